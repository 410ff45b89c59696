"""Work on rented machines: jobs, and what they bring back."""

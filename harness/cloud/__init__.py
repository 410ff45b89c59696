"""Work on rented machines: jobs, and the runs that they return."""

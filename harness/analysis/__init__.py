"""From a stored run to its summary: numbers and reason codes; no model, no clock, no sentences."""

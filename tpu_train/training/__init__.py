"""The loop that trains, and what it writes."""

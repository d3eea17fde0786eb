"""What did we decide? Pure: no torch in this room."""

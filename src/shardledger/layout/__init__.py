"""Which element lives where? Pure integers: no torch in this room."""

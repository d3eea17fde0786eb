"""What survives? Writes and reads the training state of all ranks; see the README of this folder for the format."""

"""What can be asked about a checkpoint on a laptop: no process group, memory for one tensor at a time."""

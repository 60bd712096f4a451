"""What lets other software decode MARS checkpoints."""

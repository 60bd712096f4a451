"""What a model and its dials are worth: measured, beside others, on one machine in one run."""

"""Training: recipes, data, the loss over both streams, distillation, and publishing."""

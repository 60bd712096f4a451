"""Turn an instruct model into a MARS model: data, two-stream training, distillation."""

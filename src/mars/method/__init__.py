"""The method as pure functions of values and tensors: layouts, visibility, dials, sampling."""

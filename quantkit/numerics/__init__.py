"""Number formats, scales, masks and packing: pure functions on tensors, no files, no devices."""

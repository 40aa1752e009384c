"""What runs on the device: the packed batch, the step, the state between steps, and memory."""

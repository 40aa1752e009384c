"""What runs on the device: the packed batch, the jitted step, the state between steps, and
memory."""

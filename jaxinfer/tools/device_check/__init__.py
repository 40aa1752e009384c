"""Parts of `device_check.py`: what is measured, and the child process that measures it."""

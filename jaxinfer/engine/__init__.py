"""The host side of continuous batching: requests, the scheduler, the page pool, and the loop over
them."""

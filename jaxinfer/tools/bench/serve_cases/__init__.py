"""The measured cases of `jaxinfer bench serve`: each starts jaxinfer serve itself."""

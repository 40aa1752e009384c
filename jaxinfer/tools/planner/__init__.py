"""What `jaxinfer plan` is made of: models by name, the roofline, the search, the report."""

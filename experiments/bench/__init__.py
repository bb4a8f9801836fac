"""Speed measurements, one file a method; run with `jaxlab bench NAME`."""

"""Numbers of four bits and fewer: encodings, scales and packing that formats, fake quantisation and kernels share."""

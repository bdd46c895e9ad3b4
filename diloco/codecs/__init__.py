"""What deltas look like on the wire: encode, decode, and the native kernels that do both."""

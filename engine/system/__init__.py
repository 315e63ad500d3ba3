"""What the operating system offers: memory, processors, power, temporary folders."""

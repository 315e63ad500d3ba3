"""Services of the operating system: memory, processors, power, temporary folders."""

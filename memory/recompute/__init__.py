"""Which forward ops run again so that a step fits a byte budget."""

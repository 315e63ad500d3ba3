"""The chat in lines: nothing is drawn over, coloured or animated. For screen readers, dumb terminals and scripts."""

"""Pictures and pages: what people read.  Draws data that others computed; imports no torch."""

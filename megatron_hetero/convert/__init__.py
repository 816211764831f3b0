"""Plans of other systems as layouts of ours, and back where they can say what a plan says."""

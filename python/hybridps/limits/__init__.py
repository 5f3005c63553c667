"""What a network allows, and what would come nearer to it: formulas that know nothing of the rest."""

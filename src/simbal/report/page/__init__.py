"""The page of a sweep: curves of its arms, figures of the curves, and one file of HTML that holds them."""

"""What one paper alone needs: its figures, its arithmetic, its own ways to judge a claim; a file or a folder a paper.

``report/claims.py`` finds two mappings in ``papers/<paper>``, both optional: ``EXACT``, from a claim's ``exact`` to a
function that gives (does it hold?, the numbers), and ``COMPARED``, from a claim's ``by`` to one that gives pairs of
(where, difference). What several papers use lies in ``report``. No paper imports another.
"""

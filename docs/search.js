/* Scores of a search: as Sphinx has them, but guides come before the API, unless a name is spelt as it is. */
"use strict";

const QUERY = new URLSearchParams(window.location.search).get("q") || "";

var Scorer = {
  score: ([page, title, , , score]) =>
    page.startsWith("api/") && !title.endsWith(QUERY) ? score - 20 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

/* Scores of a search: those of Sphinx, but guides come before the API, except for a page of the very name. */
"use strict";

const QUERY = new URLSearchParams(window.location.search).get("q") || "";

var Scorer = {
  score: ([page, title, , , score]) =>
    page.startsWith("api/") && title !== QUERY ? score - 20 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

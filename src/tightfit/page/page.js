"use strict";
(() => {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  const toggle = document.getElementById("theme");
  const name = () => { toggle.textContent = isDark() ? "Light theme" : "Dark theme"; };
  toggle.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
  dark.addEventListener("change", name);
  toggle.hidden = false;
  name();

  // A box stands for every curve whose `meta` holds its word: a category's, or one of the two steps'.
  document.querySelectorAll("fieldset[data-chart] input").forEach((box) => box.addEventListener("change", () => {
    const fieldset = box.closest("fieldset");
    const chart = document.getElementById(fieldset.dataset.chart);
    const off = new Set([...fieldset.querySelectorAll("input")].filter((b) => !b.checked).map((b) => b.value));
    const shown = chart.data.map((trace) => !String(trace.meta).split(" ").some((word) => off.has(word)));
    Plotly.restyle(chart, { visible: shown });
  }));
  // A chart behind a closed line was drawn without a width.
  document.querySelectorAll("details").forEach((folded) => folded.addEventListener("toggle", () => {
    folded.querySelectorAll(".js-plotly-plot").forEach((chart) => Plotly.Plots.resize(chart));
  }));
})();

"use strict";
(() => {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const charts = [...document.querySelectorAll(".chart")];
  // Plotly's own bar offers to send a chart to its cloud: a profile is nobody else's business.
  const settings = { responsive: true, displaylogo: false, showSendToCloud: false, showEditInChartStudio: false,
                     showLink: false, plotlyServerURL: "", modeBarButtonsToRemove: [
                       "sendChartToCloud", "sendDataToCloud", "select2d", "lasso2d", "toImage"] };
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // Text, grid and hover labels take the page's colours; what is drawn keeps its own.
  const themed = (layout) => {
    const ink = colour("--ink"), line = colour("--line"), back = colour("--back");
    const changes = { "font.color": ink, "hoverlabel.bgcolor": back, "hoverlabel.font.color": ink,
                      "hoverlabel.bordercolor": line, "modebar.color": colour("--soft"),
                      "modebar.activecolor": ink, "modebar.bgcolor": "rgba(0,0,0,0)" };
    for (const axis of ["xaxis", "yaxis"]) {
      Object.assign(changes, { [`${axis}.gridcolor`]: line, [`${axis}.linecolor`]: line, [`${axis}.zerolinecolor`]: line,
                               [`${axis}.tickcolor`]: line });
    }
    (layout.annotations || []).forEach((_, i) => { changes[`annotations[${i}].arrowcolor`] = ink; });
    return changes;
  };
  const draw = async (chart) => {
    const figure = JSON.parse(document.getElementById(`${chart.id}-data`).textContent);
    await Plotly.newPlot(chart, figure.data, figure.layout, settings);
    await Plotly.relayout(chart, themed(figure.layout));
    chart.dataset.drawn = "yes";
  };
  const recolour = () => charts.forEach((chart) => {
    if (chart.dataset.drawn) { Plotly.relayout(chart, themed(chart.layout)); }
  });

  const isDark = () => (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  const toggle = document.getElementById("theme");
  const name = () => { toggle.textContent = isDark() ? "Light theme" : "Dark theme"; };
  toggle.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); recolour(); });
  dark.addEventListener("change", () => { name(); recolour(); });
  toggle.hidden = false;
  name();

  // A box stands for every curve whose `meta` holds its word: a category's, or one of the two steps'.
  const boxes = [...document.querySelectorAll("fieldset[data-chart] input")];
  boxes.forEach((box) => box.addEventListener("change", () => {
    const fieldset = box.closest("fieldset");
    const chart = document.getElementById(fieldset.dataset.chart);
    const off = new Set([...fieldset.querySelectorAll("input")].filter((b) => !b.checked).map((b) => b.value));
    const shown = chart.data.map((trace) => !String(trace.meta).split(" ").some((word) => off.has(word)));
    Plotly.restyle(chart, { visible: shown });
  }));
  // Charts behind a closed line are drawn when it opens: hidden, they have no width.
  charts.forEach((chart) => {
    const folded = chart.closest("details:not([open])");
    if (folded) { folded.addEventListener("toggle", () => { if (!chart.dataset.drawn) { draw(chart); } }); }
    else { draw(chart); }
  });
})();

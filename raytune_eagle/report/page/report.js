"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const FEW = 25;

  // ------------------------------------------------------------------------------------------------------- charts
  const colour = name => getComputedStyle(root).getPropertyValue("--" + name.slice(1)).trim();

  function resolve(value) {  // "@accent" -> the theme's colour; launches -> their names
    if (typeof value === "string") return /^@[a-z0-9]+$/.test(value) ? colour(value) : value;
    if (Array.isArray(value)) return value.every(item => typeof item === "number") ? value : value.map(resolve);
    if (value === null || typeof value !== "object") return value;
    const out = {};
    for (const [key, item] of Object.entries(value)) {
      if (key === "launches") out.text = item.map(n => escaped(DATA.labels[n]));
      else out[key] = resolve(item);
    }
    return out;
  }

  const escaped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function layout(own, narrow) {
    const look = {gridcolor: colour("@line"), linecolor: colour("@line"), zerolinecolor: colour("@line"), tickfont: {size: narrow ? 11 : 12}};
    const resolved = resolve(own);
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("@text")},
      margin: {l: narrow ? 44 : 60, r: narrow ? 10 : 20, t: 28, b: 48}, hovermode: "closest",
      hoverlabel: {bgcolor: colour("@surface"), bordercolor: colour("@line"), font: {color: colour("@text")}, align: "left"},
      legend: {orientation: "h", x: 0, y: 1.02, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)"},
      dragmode: narrow ? false : "zoom",
      ...resolved,
      xaxis: {automargin: true, ...look, ...resolved.xaxis},
      yaxis: {automargin: true, ...look, ...resolved.yaxis},
    };
  }

  function library() {  // a second's work: done when the first chart is to be drawn, not while the page is read
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotly").textContent;
    document.head.append(script);
  }

  function draw(figure) {
    const chart = DATA.charts[figure.dataset.chart], plot = figure.querySelector(".plot");
    figure.querySelectorAll("[data-colour]").forEach(i => { i.style.background = colour(i.dataset.colour); });
    const narrow = plot.clientWidth < 480;
    const config = {responsive: true, displaylogo: false, displayModeBar: narrow ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]};
    Plotly.react(plot, resolve(chart.data), layout(chart.layout, narrow), config).then(() => {
      figure.dataset.drawn = "yes";
      plot.querySelectorAll("svg").forEach(svg => svg.setAttribute("aria-hidden", "true"));
    });
  }

  // Charts come into view, wait here, and are drawn one at a time while nothing else is asked of the page.
  const waiting = [], whenIdle = window.requestIdleCallback || (work => setTimeout(work, 1));
  function next() {
    if (!window.Plotly) library();
    else {
      const figure = waiting.shift();
      if (figure.offsetParent) draw(figure); else seen.observe(figure);  // hidden since
    }
    if (waiting.length) whenIdle(next);
  }
  const ask = figure => { if (!waiting.includes(figure) && waiting.push(figure) === 1) whenIdle(next); };
  const seen = new IntersectionObserver(entries => entries.forEach(entry => {
    if (entry.isIntersecting) { seen.unobserve(entry.target); ask(entry.target); }
  }), {rootMargin: "200px"});
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  figures.forEach(figure => seen.observe(figure));
  const redraw = () => figures.filter(f => f.dataset.drawn && f.offsetParent).forEach(ask);
  const stale = () => figures.filter(f => f.dataset.drawn && !f.offsetParent).forEach(f => { delete f.dataset.drawn; seen.observe(f); });

  // ------------------------------------------------------------------------------------------------------- tables
  function shown(value) {
    if (value === null || value === undefined) return "–";
    return typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : String(value);
  }

  function table(where, columns, rows) {
    let order = [...rows.keys()], all = rows.length <= FEW, sorted = [-1, 1];
    const cell = (row, c) => columns[c][2] && row[c] !== null ? `#${row[c]} ${DATA.labels[row[c]]}` : shown(row[c]);
    const numeric = columns.map((_, c) => !columns[c][2] && rows.every(r => r[c] === null || typeof r[c] === "number"));
    const scroll = document.createElement("div"), built = document.createElement("table");
    scroll.className = "scroll"; scroll.tabIndex = 0; scroll.setAttribute("role", "region"); scroll.setAttribute("aria-label", "Table");
    const head = built.createTHead().insertRow(), body = built.createTBody();
    columns.forEach(([name, unit], c) => {
      const th = document.createElement("th"), button = document.createElement("button");
      th.scope = "col"; if (!numeric[c]) th.className = "text";
      button.type = "button"; button.textContent = unit ? `${name}, ${unit}` : name;
      button.addEventListener("click", () => {
        sorted = [c, sorted[0] === c ? -sorted[1] : 1];
        const key = columns[c][2] ? r => cell(rows[r], c) : r => rows[r][c];
        order.sort((a, b) => { const [x, y] = [key(a), key(b)];
          if (x === null || y === null) return (x === null) - (y === null);
          return sorted[1] * (x < y ? -1 : x > y ? 1 : 0); });
        [...head.cells].forEach((h, i) => h.setAttribute("aria-sort", i !== c ? "none" : sorted[1] > 0 ? "ascending" : "descending"));
        fill();
      });
      th.append(button); head.append(th);
    });
    const more = document.createElement("button");
    more.type = "button"; more.className = "more"; more.addEventListener("click", () => { all = true; fill(); });
    function fill() {
      const use = all ? order : order.slice(0, FEW);
      body.replaceChildren(...use.map(r => {
        const tr = document.createElement("tr");
        columns.forEach((_, c) => { const td = document.createElement("td");
          td.textContent = cell(rows[r], c); if (!numeric[c]) td.className = "text"; tr.append(td); });
        return tr;
      }));
      more.hidden = all || order.length <= FEW;
      more.textContent = `Show all ${order.length.toLocaleString("en")} rows`;
    }
    fill(); scroll.append(built); where.replaceChildren(scroll, more);
    return words => {
      const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
      order = [...rows.keys()].filter(r => { const text = columns.map((_, c) => cell(rows[r], c)).join(" ").toLowerCase();
        return wanted.every(word => text.includes(word)); });
      all = order.length <= FEW; fill();
    };
  }

  figures.forEach(figure => figure.querySelector("details").addEventListener("toggle", event => {
    const where = figure.querySelector(".table"), chart = DATA.charts[figure.dataset.chart];
    if (event.target.open && !where.firstChild) table(where, chart.columns, chart.rows);
  }));
  const filter = table(document.getElementById("launches"), DATA.launches.columns, DATA.launches.rows);
  let pause; document.getElementById("filter").addEventListener("input", event => {
    clearTimeout(pause); pause = setTimeout(() => filter(event.target.value), 120);
  });

  // ------------------------------------------------------------------------------------------------------- buttons
  document.querySelectorAll(".level").forEach(button => button.addEventListener("click", () => {
    document.querySelectorAll(".level").forEach(b => b.setAttribute("aria-pressed", String(b === button)));
    document.querySelectorAll("[data-of]").forEach(part => { part.hidden = part.dataset.of !== button.dataset.level; });
  }));
  document.querySelectorAll(".copy").forEach(button => button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copy);
    try { await navigator.clipboard.writeText(source.textContent); }
    catch { const range = document.createRange(); range.selectNodeContents(source);
      getSelection().removeAllRanges(); getSelection().addRange(range); document.execCommand("copy"); }
    button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1600);
  }));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark"; stale(); redraw();
  });
  dark.addEventListener("change", () => { stale(); redraw(); });
  root.dataset.ready = "yes";
})();

"use strict";
(() => {
  const token = new URLSearchParams(location.hash.slice(1)).get("token") || sessionStorage.getItem("token") || "";
  if (token) { sessionStorage.setItem("token", token); history.replaceState(null, "", location.pathname); }
  const $ = id => document.getElementById(id);
  let state = null, received = 0;

  function el(tag, attributes = {}, ...children) {  // texts only ever become text nodes
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) value === null || value === false || node.setAttribute(name, value === true ? "" : value);
    node.append(...children.filter(child => child !== null));
    return node;
  }
  const fill = (id, ...children) => $(id).replaceChildren(...children);

  function span(seconds) {
    if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
    const minutes = Math.round(seconds / 60);
    return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }
  const tokens = value => value >= 1000 ? Math.round(value).toLocaleString("en") : value.toPrecision(4);
  const clock = at => new Date(at * 1000).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit", second: "2-digit"});

  async function wish(body, button) {
    button.disabled = true;
    try {
      const answer = await fetch("wish", {method: "POST", headers: {"X-Token": token, "Content-Type": "application/json"}, body: JSON.stringify(body)});
      say(answer.ok ? "" : await answer.text());
    } catch { say("The dashboard does not answer."); }
    button.disabled = false;
  }
  function say(text) { $("said").textContent = text; $("said").hidden = !text; }

  function node(each) {
    const share = /(\d+)\/(\d+)/.exec(each.detail) || /^(\d+) of at most (\d+)/.exec(each.detail);
    const running = state.launches.length === 0 || each.number !== null;
    const button = el("button", {type: "button", class: "quiet"}, each.aside ? "Take back" : "Put aside");
    button.addEventListener("click", () => wish({what: each.aside ? "back" : "aside", node: each.name}, button));
    return el("article", {class: "node" + (each.aside ? " aside" : ""), "aria-label": each.name},
      el("div", {class: "bar"}, el("h3", {}, each.name), token ? button : null),
      el("p", {class: "state"}, (running && each.number !== null ? `#${each.number} ` : "") + each.state + (each.aside && each.number !== null ? ", then put aside" : ""),
        el("time", {"data-since": each.since}, "")),
      share ? el("div", {class: "meter small"}, el("i", {style: null, "data-share": Number(share[1]) / Number(share[2])})) : null,
      each.detail ? el("p", {class: "detail"}, each.detail) : null);
  }

  function launch(each) {
    const result = each.figures.length
      ? each.figures.map(([level, speed, times]) => `${tokens(speed)} tok/s` + (each.figures.length > 1 ? ` at ${level}` : "") + (times ? ` (${times.toFixed(2)}×)` : "")).join(", ")
      : "";
    const tone = each.status === "completed" ? "" : ["infeasible", "hopeless"].includes(each.status) ? "warn" : "bad";
    return el("tr", {}, el("td", {class: "text"}, `#${each.number}`),
      el("td", {class: "text", title: each.command}, each.label, each.kind === "trial" ? null : el("small", {}, ` ${each.kind}`)),
      el("td", {class: "text"}, each.node),
      el("td", {class: "text " + tone}, [result, each.status === "completed" ? "" : each.status, each.why].filter(Boolean).join(" · ")),
      el("td", {}, span(each.seconds)), el("td", {class: "text"}, el("a", {href: `log/${each.log}`}, "log")));
  }

  function course() {
    const level = Object.keys(state.course)[0], points = level ? state.course[level] : [];
    $("course").toggleAttribute("hidden", points.length < 2);
    if (points.length < 2) return;
    const svg = name => document.createElementNS("http://www.w3.org/2000/svg", name);
    const most = Math.max(...points.map(p => p[1])), [first, last] = [points[0][0], points[points.length - 1][0]];
    const wide = $("course").clientWidth || 600;
    $("course").setAttribute("viewBox", `0 0 ${wide} 120`);
    const x = n => 6 + (wide - 12) * (n - first) / Math.max(1, last - first), y = v => 112 - 100 * v / most;
    let best = 0, path = "";
    const dots = points.map(([n, v]) => {
      if (v > best) { path += path ? `H${x(n)}V${y(v)}` : `M${x(n)} ${y(v)}`; best = v; }
      const dot = svg("circle"); dot.setAttribute("cx", x(n)); dot.setAttribute("cy", y(v)); dot.setAttribute("r", 3); return dot;
    });
    const line = svg("path"); line.setAttribute("d", `${path}H${wide - 6}`);
    fill("course", line, ...dots);
    $("course").setAttribute("aria-label", `Throughput of ${points.length} launches at ${level} streams; best ${tokens(best)} tokens per second`);
  }

  function show() {
    if (state.error) { say(state.error); return; }
    document.title = `${state.trials}/${state.budget || "?"} · ${state.study}`;
    $("study").textContent = state.study;
    const meta = [["Trials", `${state.trials}` + (state.budget ? ` of ${state.budget}` : "")], ["Failed launches", state.failed],
      ["Time left", state.left_s === null ? "–" : `about ${span(state.left_s)}`], ["Node-hours", state.node_hours.toFixed(2)]];
    if (state.cost !== null) meta.push(["Cost so far", state.cost.toLocaleString("en", {maximumFractionDigits: 2})]);
    meta.push(["Run", state.writer ? `process ${state.writer.pid} on ${state.writer.host}` : "none goes on"]);
    fill("meta", ...meta.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));
    $("meter").setAttribute("aria-valuemax", state.budget || 1); $("meter").setAttribute("aria-valuenow", state.trials);
    $("meter").firstElementChild.style.width = `${100 * Math.min(1, state.trials / (state.budget || 1))}%`;
    fill("best", ...(state.best.length ? state.best.map(b => el("div", {class: "best"}, el("p", {class: "eyebrow"}, `at ${b.concurrency} stream${b.concurrency === 1 ? "" : "s"}`),
      el("p", {class: "big"}, tokens(b.throughput), el("small", {}, " tok/s")), el("p", {}, b.label + (b.speedup ? ` · ${b.speedup.toFixed(2)}× plain decoding` : "")),
      el("p", {class: "detail"}, `${tokens(b.low)} to ${tokens(b.high)}`))) : [el("p", {class: "detail"}, "No trial has figures yet.")]));
    course();
    fill("nodes", ...(state.nodes.length ? state.nodes.map(node) : [el("p", {class: "detail"}, state.writer ? "No node has begun yet." : "No run goes on now.")]));
    document.querySelectorAll("[data-share]").forEach(bar => { bar.style.width = `${100 * bar.dataset.share}%`; });
    fill("launches", ...state.launches.map(launch));
    fill("failures", ...(state.failures.length ? state.failures.map(f => el("li", {}, el("b", {}, f.name), ` ${f.count} · #${f.number}: ${f.detail}`)) : [el("li", {class: "detail"}, "None.")]));
    fill("notes", ...(state.notes.length ? state.notes.map(n => el("li", {}, el("time", {}, clock(n.at)), ` ${n.name} ${n.node} `, el("span", {class: "detail"}, n.detail))) : [el("li", {class: "detail"}, "None.")]));
    $("stop").hidden = !(token && state.writer); $("stop").disabled = state.stopping;
    if (state.stopping) { $("stop").textContent = "Stopping …"; }
    tick(); document.documentElement.dataset.ready = "yes";
  }

  function tick() {
    if (!state || state.error) return;
    const now = state.now + (performance.now() - received) / 1000;
    document.querySelectorAll("[data-since]").forEach(each => { each.textContent = ` for ${span(now - Number(each.dataset.since))}`; });
  }

  let sure = -Infinity;
  $("stop").addEventListener("click", () => {
    if (performance.now() - sure > 4000) { sure = performance.now(); $("stop").textContent = "Press again to stop"; setTimeout(() => { if (!state.stopping) $("stop").textContent = "Stop the study"; }, 4000); return; }
    wish({what: "stop"}, $("stop"));
  });
  const link = text => { $("link").textContent = text; $("link").className = "pill " + (text === "live" ? "good" : "bad"); };
  const source = new EventSource("events");
  source.onopen = () => link("live");
  source.onerror = () => link("no connection");
  source.onmessage = event => { state = JSON.parse(event.data); received = performance.now(); say(""); show(); };
  setInterval(tick, 1000);
})();

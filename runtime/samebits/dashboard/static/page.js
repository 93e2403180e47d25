"use strict";
// One page for a live job, a finished job and a report; only the source of the data differs.
(() => {
  const $ = (id) => document.getElementById(id);
  const MOST_EVENTS = 5000, SHOWN_EVENTS = 400, MOST_POINTS = 3000, BY_HOST = 16, MANY = 64;
  const SIGNS = { training: "●", done: "✔", finished: "✔", forming: "◐", waiting: "○", seated: "·", lost: "✕", left: "–", warm: "◇", warming: "◌", unknown: "?", retired: "–", runs: "●" };
  const BAD = new Set(["lost", "gone"]);
  const BUCKETS = ["productive", "start_up", "noticing_losses", "forming", "waiting_for_seats", "restoring", "redone", "checkpoint_stalls", "idle"];
  const PHASES = ["silent", "decide", "idle", "wait_for_seats", "meet", "restore"];
  const embedded = $("data") ? JSON.parse($("data").textContent) : null;
  let state = null, events = [], steps = [], losses = [], chosen = null, alive = false, skew = 0, drawn = {}, dirty = true;

  // ---- language and theme
  let stored = {};
  try { stored = JSON.parse(localStorage.getItem("samebits") || "{}"); } catch { stored = {}; }
  let language = stored.language || ((navigator.language || "").toLowerCase().startsWith("zh") ? "zh" : "en");
  let theme = stored.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const keep = () => { try { localStorage.setItem("samebits", JSON.stringify({ language, theme })); } catch { /* private window */ } };
  const word = (name) => WORDS[language][name] ?? name;
  const of = (group, name) => WORDS[language][group][name] ?? name;
  function dress() {
    document.documentElement.dataset.theme = theme;
    document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
    for (const node of document.querySelectorAll("[data-word]")) node.textContent = word(node.dataset.word);
    for (const node of document.querySelectorAll("[data-label]")) node.setAttribute("aria-label", word(node.dataset.label));
    $("language").textContent = language === "zh" ? "English" : "中文";
    $("language").lang = language === "zh" ? "en" : "zh-CN";
    drawn = {};
    for (const id of ["plot-speed", "plot-loss"]) if (plots[id]) { plots[id].destroy(); delete plots[id]; }
    fillKinds(true); fillKey(); dirty = true; paint();
  }

  // ---- formatting
  const make = (tag, name, text) => { const node = document.createElement(tag); if (name) node.className = name; if (text !== undefined) node.textContent = text; return node; };
  const put = (id, text) => { if (drawn[id] !== text) { drawn[id] = text; $(id).textContent = text; } };
  const two = (n) => String(n).padStart(2, "0");
  const clock = (at) => { const d = new Date(at * 1000); return `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`; };
  const stamp = (at) => { const d = new Date(at * 1000); return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${clock(at)}.${String(d.getMilliseconds()).padStart(3, "0")}`; };
  const long = (s) => s < 1 ? `${Math.round(s * 1000)} ms` : s < 60 ? `${Number.isInteger(s) ? s : s.toFixed(1)} s` : s < 3600 ? `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s` : `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
  const span = (ms) => ms > 10_000 ? long(ms / 1000) : `${Math.round(ms)} ms`;
  const fill = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? "–");
  const now = () => embedded ? state?.now ?? 0 : Date.now() / 1000 + skew;

  // ---- painting; unchanged elements are not touched
  function paint() {
    if (!state) { put("link", word(alive ? "nojob" : "gone")); return; }
    const job = state.job, over = !job || job.finished || job.from_journal;
    const link = embedded || (alive && !state.linked && (!job || job.finished || job.ended)) ? "over" : !alive ? "gone" : state.linked ? "linked" : "away";
    put("link", word(link)); $("link").className = `pill ${link === "linked" ? "good" : link === "over" ? "" : "bad"}`;
    put("name", job ? `${job.name || ""} ${job.id.slice(0, 8)}` : "");
    const inc = state.incident, phase = !job ? "" : inc?.kind === "stopped" ? (byYou(inc) ? of("ph", "stopped") : of("k", "stopped")) : inc?.kind === "failed" && !isCut(inc) ? of("ph", "failed") : inc?.kind === "hang" ? of("ph", "hang") : phaseOf(job.phase);
    document.title = job ? `${inc && TONES[inc.kind] === "bad" ? "✕ " : ""}${phase}${job.step ? ` · ${job.step}` : ""} · SameBits` : "SameBits";
    const rates = speeds(), pace = job && !over && job.phase === "training" && state.linked ? state.progress.steps_per_s : null, total = state.progress.total_steps;
    if (job) {
      put("phase", phase); put("step", String(job.step || "–")); // a plain job's steps are unknown
      put("workers", `${job.alive}/${job.world_size}${job.world_size < job.wanted_size ? ` (${job.wanted_size})` : ""}${job.spares_alive ? ` · ${job.spares_alive} ${word("spares")}` : ""}${job.joining ? `, ${job.joining} ${word("joining")}` : ""}${job.held_back ? `, ${job.held_back} ${word("held_back")}` : ""}`);
      const left = pace !== null && state.progress.left_s !== null ? `${long(Math.round(state.progress.left_s))} ${word("left")}` : "";
      put("stand", [phase, job.step ? `${word("step")} ${job.step}${total ? `/${total}` : ""}` : "", left].filter(Boolean).join(" · "));
      $("progress").hidden = !total; $("progress").value = total ? Math.min(1, job.step / total) : 0; $("progress").setAttribute("aria-label", word("step"));
    }
    put("goodput", state.goodput === null ? "–" : `${(state.goodput * 100).toFixed(1)} %`);
    put("recovered", String(state.recovery_count));
    put("committed", state.committed_step === null ? "–" : `${state.committed_step}${embedded || over ? "" : ` · ${long(Math.max(1, Math.round(now() - state.committed_at)))}`}`);
    put("speed", pace === null ? "–" : pace.toFixed(pace < 10 ? 2 : 1));
    put("loss", state.progress.values.loss ?? "–");
    paintIncident(); paintAilments();
    paintBuckets(); paintRanks();
    if (dirty) { dirty = false; paintRecoveries(); paintEvents(); paintPlots(rates); }
    else if (!embedded && !over) plot("plot-speed", rates, word("speed"), true, state.recoveries.map((row) => row.noticed_at));
  }

  // ---- the incident
  const TONES = { lost: "bad", rejoining: "warn", no_scheduler: "bad", all_gone: "bad", hang: "bad", saves: "warn", recovered: "good", finished: "good", stopped: "info", failed: "bad" };
  const byYou = (inc) => /^stopped by (Ctrl-C|samebits stop|the page)/.test(inc.why);
  const isCut = (inc) => ["interrupted", "formation_timeout"].includes(inc.facts.label); // it ran out of workers or time
  const rankOf = (one) => [one.slot === null || one.slot === undefined ? `worker ${one.node}` : `rank ${one.slot}${String(one.slot) === one.node ? "" : ` (worker ${one.node})`}`, one.host, one.pid ? `pid ${one.pid}` : ""].filter(Boolean).join(", ");
  function whyOf(inc) {
    const say = (name, values) => fill(of("why_inc", name), values), facts = inc.facts, at = (time) => clock(time);
    if (inc.kind === "saves" || inc.kind === "finished") return say(inc.kind, facts);
    if (inc.kind !== "no_scheduler" && inc.kind !== "all_gone") return inc.why || "–";
    const parts = [say("no_scheduler", facts), state.away_known ? say("exact", { at: at(inc.since) }) : inc.since ? say("about", { at: at(inc.since) }) : ""];
    if (inc.kind === "all_gone") parts.push(say("all_gone", facts));
    else parts.push(facts.running ? say("running", facts) : "", facts.reported_at ? say("reported", { step: facts.reported_step, at: at(facts.reported_at) }) : say("unreported", facts), facts.elsewhere ? say("elsewhere", facts) : "");
    return parts.filter(Boolean).join(" ");
  }
  function paintIncident() {
    const inc = state.incident, box = $("incident");
    box.hidden = !inc;
    if (!inc) return;
    const facts = inc.facts, count = inc.ranks.length + inc.more;
    const title = inc.kind === "stopped" && byYou(inc) ? "stopped_by_you" : inc.kind === "failed" && isCut(inc) ? "interrupted" : inc.kind;
    const next = inc.kind === "failed" && inc.follows === "can_continue" ? "failed" : inc.follows === "hang_ends" && !facts.supervised ? "hang_ends_only" : inc.follows;
    const values = { ...facts, n: count, is: count === 1 ? "is" : "are", spares: (facts.spares || []).join(", "), waited: long(facts.waited_s || 0), window: long(facts.window_s || 0), total: span(facts.total_ms || 0) };
    box.className = TONES[inc.kind];
    put("i-title", `${fill(of("inc", title), values)}${inc.since ? ` · ${word("since")} ${clock(inc.since)}` : ""}`);
    put("i-rank", inc.ranks.map(rankOf).join("; ") + (inc.more ? ` ${fill(word("more_ranks"), { n: inc.more })}` : "") || word("norank"));
    put("i-why", whyOf(inc)); put("i-next", fill(of("nxt", next), values));
    const counts = Object.entries(inc.until).map(([name, at]) => fill(of("unt", name), { s: at > now() ? long(Math.ceil(at - now())) : `0 s` }));
    $("i-until").hidden = !counts.length; put("i-until", counts.join(" · "));
    $("i-run").hidden = !inc.command;
    if (drawn.command !== inc.command + language) { drawn.command = inc.command + language; $("i-command").textContent = inc.command; $("copy").textContent = word("copy"); }
  }
  function paintAilments() {
    const told = [...state.ailments, ...state.stragglers], key = told.join("\n");
    $("hosts").hidden = !told.length;
    if (drawn.ailments !== key) { drawn.ailments = key; $("ailments").replaceChildren(...told.map((text) => make("li", "", `▲ ${text}`))); }
  }
  async function copyCommand() {
    const text = $("i-command").textContent;
    try { await navigator.clipboard.writeText(text); } catch { // plain HTTP from another machine has no clipboard
      const range = document.createRange(); range.selectNodeContents($("i-command"));
      getSelection().removeAllRanges(); getSelection().addRange(range); document.execCommand("copy");
    }
    $("copy").textContent = word("copied");
  }
  $("copy").addEventListener("click", copyCommand);

  const phaseOf = (text) => { const [first, ...rest] = text.split(";"); return [of("ph", first), ...rest].join(";"); };
  function paintBuckets() {
    const parts = BUCKETS.filter((name) => state.buckets_s[name] > 0), total = state.wall_s || 1;
    if (drawn.buckets !== parts.join() + language) {
      drawn.buckets = parts.join() + language;
      $("buckets").replaceChildren(...parts.map((name) => make("span", name)));
      $("legend").replaceChildren(...parts.map((name) => { const li = make("li"); li.append(make("i", name), make("span", "", `${of("b", name)} `), make("b")); return li; }));
    }
    parts.forEach((name, at) => {
      const seconds = state.buckets_s[name];
      $("buckets").children[at].style.width = `${100 * seconds / total}%`;
      $("legend").children[at].lastChild.textContent = `${long(seconds)} · ${(100 * seconds / total).toFixed(1)} %`;
    });
    $("buckets").setAttribute("aria-label", parts.map((name) => `${of("b", name)} ${(100 * state.buckets_s[name] / total).toFixed(1)} %`).join(", "));
  }

  const lookOf = (rank) => rank.role === "retired" ? "retired" : rank.state !== "alive" ? rank.state : rank.role === "spare" ? (rank.activity === "seated" ? "warming" : "warm") : state.job.from_journal ? "runs" : rank.activity;
  const stepOf = (rank) => rank.step > 0 ? `${word("step")} ${rank.step}` : ""; // unknown for a spare, or a rank of a dead job
  const nameOf = (rank) => rank.slot === null ? `${word("spares")} ${rank.node}` : String(rank.slot) === rank.node ? rank.node : `${rank.slot} (${rank.node})`;
  const cellsIn = () => [...$("ranks").querySelectorAll(".rank")];
  function layRanks(ranks) { // one group per host above BY_HOST ranks, else one for all
    const box = $("ranks"), hosts = new Map();
    for (const rank of ranks) { const host = ranks.length > BY_HOST ? rank.host : ""; hosts.set(host, [...(hosts.get(host) || []), rank]); }
    const key = JSON.stringify([...hosts].map(([host, some]) => [host, some.length]));
    box.classList.toggle("many", ranks.length > MANY); box.classList.toggle("table", ranks.length > BY_HOST && ranks.length <= MANY);
    if (drawn.laid !== key) {
      drawn.laid = key;
      let place = 0;
      box.replaceChildren(...[...hosts].map(([host, some]) => {
        const group = make("div", "host"), head = make("p", "head"), cells = make("div", "cells");
        head.hidden = !host;
        for (const _ of some) {
          const cell = make("button", "rank"); cell.type = "button"; cell.setAttribute("role", "gridcell"); cell.tabIndex = place++ ? -1 : 0;
          cell.append(make("span", "sign"), make("strong"), make("span"), make("small")); cells.append(cell);
        }
        cells.setAttribute("role", "row"); group.append(head, cells);
        return group;
      }));
    }
    [...hosts].forEach(([host, some], at) => {
      const counts = {};
      for (const rank of some) counts[lookOf(rank)] = (counts[lookOf(rank)] || 0) + 1;
      const bad = some.filter((rank) => BAD.has(lookOf(rank))).map((rank) => nameOf(rank));
      const text = [fill(of("heads", "host"), { host }), fill(of("heads", "ranks"), { n: some.length }), ...Object.entries(counts).map(([look, n]) => fill(of("heads", "states"), { n, state: of("a", look) })), bad.length ? `✕ ${bad.slice(0, 16).join(", ")}` : ""].filter(Boolean).join(" · ");
      const head = box.children[at].firstChild;
      if (head.textContent !== text) head.textContent = text;
    });
    return [...hosts.values()].flat();
  }
  function paintRanks() {
    const ranks = layRanks(state.ranks.filter((rank) => rank.role !== "retired")), cells = cellsIn(), isMany = ranks.length > MANY;
    ranks.forEach((rank, at) => {
      const cell = cells[at], look = lookOf(rank), key = [rank.node, rank.slot, look, rank.step, rank.pid, language, chosen === rank.node].join();
      if (cell.dataset.key === key) return;
      cell.dataset.key = key; cell.dataset.node = rank.node; cell.className = `rank ${look}`;
      cell.children[0].textContent = isMany && ["training", "done", "finished", "runs"].includes(look) ? "" : SIGNS[look] || "·";
      cell.children[1].textContent = isMany && rank.slot !== null ? String(rank.slot) : nameOf(rank);
      cell.children[2].textContent = of("a", look);
      cell.children[3].textContent = [stepOf(rank), rank.host, rank.pid ? `pid\u00a0${rank.pid}` : ""].filter(Boolean).join(" · ");
      cell.setAttribute("aria-selected", String(chosen === rank.node));
      cell.setAttribute("aria-label", [`${rank.node}: ${of("a", look)}`, stepOf(rank), rank.host, `pid ${rank.pid}`].filter(Boolean).join(", "));
      cell.title = [`${rank.node}: ${of("a", look)}`, stepOf(rank), rank.host, `pid ${rank.pid}`].filter(Boolean).join(" · ");
    });
    const rank = ranks.find((one) => one.node === chosen);
    $("detail").hidden = !rank;
    if (rank) {
      put("who", `worker ${rank.node}`);
      put("facts", [of("a", lookOf(rank)), stepOf(rank), `pid ${rank.pid}`, rank.host, `incarnation ${rank.incarnation}`, rank.reason].filter(Boolean).join(" · "));
    }
  }

  function paintRecoveries() {
    const rows = state.recoveries.slice(-100).reverse(), body = $("recoveries").tBodies[0];
    if (!rows.length) { const line = make("tr"), cell = make("td", "none", word("none")); cell.colSpan = 8; line.append(cell); body.replaceChildren(line); return; }
    const longest = Math.max(1, ...rows.map((row) => row.total_ms || 0));
    body.replaceChildren(...rows.map((row) => {
      const line = make("tr"), bars = make("td", "bars"), strip = make("div", "phases");
      const told = PHASES.filter((name) => row.phases_ms[name] > 0).map((name) => `${of("p", name)} ${span(row.phases_ms[name])}`).join(", ");
      strip.setAttribute("role", "img"); strip.setAttribute("aria-label", told); strip.title = told;
      strip.style.width = `${100 * (row.total_ms || 0) / longest}%`;
      for (const name of PHASES) if (row.phases_ms[name] > 0) { const part = make("span", name); part.style.flexGrow = row.phases_ms[name]; strip.append(part); }
      bars.append(strip);
      const named = (name, label, text) => { const cell = make("td", name, text); cell.dataset.label = label; return cell; }; // the narrow layout has no table head
      line.append(make("td", "", String(row.number)), make("td", "", clock(row.noticed_at)), named("step", word("step"), String(row.step)), make("td", "why", row.cause), bars,
        make("td", "num", row.total_ms === null ? word("running") : span(row.total_ms)), named("num redo", word("redone"), `${row.all_lost ? "≥ " : ""}${row.steps_lost}`), make("td", "wait", row.last_to_join));
      return line;
    }));
  }
  function fillKey() { $("phase-key").replaceChildren(...PHASES.map((name) => { const one = make("span"); one.append(make("i", name), of("p", name)); return one; })); }

  function fillKinds(anew) {
    const kinds = [...new Set(events.map((event) => event.kind))].filter((kind) => kind !== "step" && kind !== "carried").sort(), select = $("kind"), before = select.value;
    if (!anew && select.options.length === kinds.length + 2) return;
    select.replaceChildren(new Option(word("all"), ""), new Option(word("everything"), "*"), ...kinds.map((kind) => new Option(of("k", kind), kind)));
    select.value = before;
  }
  const textOf = (event) => event.kind === "committed" ? `${word("step")} ${event.point}` : `${event.node ? `worker ${event.node}: ` : ""}${event.text || ""}${event.after_ms !== undefined ? ` (${span(event.after_ms)})` : ""}`;
  const SEVERITY = { lost: "bad", interrupted: "bad", cause: "warn", note: "warn", "rolled back": "warn", retired: "warn", round: "warn", rebuilt: "warn", training: "good", finished: "good", trained: "good", promoted: "good", returned: "good" };
  const isStop = (event) => event.kind === "interrupted" && event.end === "stopped";
  const severityOf = (event) => isStop(event) || (event.kind === "round" && event.gently) ? "info" : SEVERITY[event.kind] || "info";
  const MARKS = { bad: "✕", warn: "▲", good: "✔", info: "·" };
  function paintEvents() {
    fillKinds(false);
    const sought = $("filter").value.toLowerCase(), kind = $("kind").value, found = [];
    let newer = null, line = null, count = 1;
    for (let at = events.length - 1; at >= 0 && found.length < SHOWN_EVENTS; at--) {
      const event = events[at];
      if (event.kind === "step" || event.kind === "carried" || (!kind && event.kind === "committed")) continue;
      const text = textOf(event), before = events[at - 1], repeats = newer && newer.kind === event.kind && textOf(newer) === text && text;
      newer = event;
      if ((kind && kind !== "*" && event.kind !== kind) || (sought && !`${event.kind} ${text}`.toLowerCase().includes(sought))) continue;
      if (!kind && event.kind === "round" && before?.kind === "lost" && before.text && event.text?.includes(before.text)) continue; // repeats the loss before it
      if (repeats) { line.lastChild.textContent = `${text} ${word("times")}${++count}`; continue; }
      count = 1;
      const severity = severityOf(event);
      line = make("li", `${event.kind} ${severity}`);
      line.append(make("time", "", stamp(event.at)), make("span", "what", `${MARKS[severity]} ${of("k", isStop(event) ? "stopped" : event.kind)}`), make("span", "at", event.step ? `${word("step")} ${event.step}` : ""), make("span", "text", text));
      line.children[1].title = of("sev", severity);
      found.push(line);
    }
    $("events").replaceChildren(...(found.length ? found : [make("li", "none", word("none"))]));
  }

  // ---- plots
  const plots = {};
  function speeds() {
    const at = [], rate = [];
    let from = null; // over at least half a second, since a shorter interval mostly shows when samples were taken
    for (const [time, step] of steps) {
      if (step === null) { if (rate.length && rate[rate.length - 1] !== null) { at.push(time); rate.push(null); } from = null; continue; }
      const seconds = from ? time - from[0] : -1;
      if (seconds < 0 || step < from[1]) { from = [time, step]; continue; } // a stretch begins, or the clock was set back
      if (seconds < 0.5) continue;
      at.push(time); rate.push((step - from[1]) / seconds); from = [time, step];
    }
    const job = state.job, ends = !embedded && job && !job.finished && !job.ended ? now() : null;
    if (at.length && ends !== null && ends > at[at.length - 1]) { at.push(ends); rate.push(null); } // the axis reaches to now
    return [at, rate];
  }
  const lastOf = (values) => values.findLast((one) => one !== null);
  function plot(id, data, label, isTime, marks) {
    const box = $(id), style = getComputedStyle(document.documentElement), ink = style.getPropertyValue("--soft").trim(), line = style.getPropertyValue("--line").trim();
    box.setAttribute("aria-label", data[0].length ? `${label}: ${Number(lastOf(data[1])).toPrecision(3)}` : `${label}: ${word("none")}`);
    if (plots[id]) { plots[id].marks = marks; plots[id].setData(data); return; }
    if (!data[0].length) return;
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
    plots[id] = new uPlot({
      width: Math.max(200, box.clientWidth), height: 210, scales: { x: { time: isTime }, y: isTime ? { range: (u, least, most) => [0, 1.1 * (most || 1)] } : {} }, legend: { show: true, live: true },
      axes: [isTime ? { ...axis, values: (u, splits) => splits.map(clock), space: 70 } : { ...axis }, { ...axis, size: 54 }], cursor: { drag: { x: true, y: false } },
      series: [{ label: isTime ? word("when") : word("step"), value: isTime ? (u, v) => v === null ? "–" : clock(v) : undefined }, { label, spanGaps: false, stroke: style.getPropertyValue("--accent").trim(), width: 2, points: { show: (u) => u.data[0].length < 3 }, value: (u, v) => v === null ? "–" : Number(v).toPrecision(4) }],
      hooks: { draw: [(u) => {
        const context = u.ctx; context.save(); context.strokeStyle = style.getPropertyValue("--waiting_for_seats").trim(); context.fillStyle = context.strokeStyle; context.setLineDash([4, 4]); context.lineWidth = devicePixelRatio;
        for (const mark of plots[id]?.marks ?? marks) {
          const x = u.valToPos(mark, "x", true);
          if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
          context.beginPath(); context.moveTo(x, u.bbox.top); context.lineTo(x, u.bbox.top + u.bbox.height); context.stroke();
          context.beginPath(); context.moveTo(x - 5 * devicePixelRatio, u.bbox.top); context.lineTo(x + 5 * devicePixelRatio, u.bbox.top); context.lineTo(x, u.bbox.top + 8 * devicePixelRatio); context.fill();
        }
        context.restore();
      }] },
    }, data, box);
    plots[id].marks = marks;
  }
  function paintPlots(rates) {
    $("noloss").hidden = losses.length > 0;
    plot("plot-speed", rates, word("speed"), true, state.recoveries.map((row) => row.noticed_at));
    plot("plot-loss", [losses.map((point) => point[0]), losses.map((point) => point[1])], word("loss"), false, state.recoveries.map((row) => row.restore_step ?? row.step));
  }
  addEventListener("resize", () => { for (const id of Object.keys(plots)) plots[id].setSize({ width: Math.max(200, $(id).clientWidth), height: 210 }); });

  // ---- incoming data
  const STEPPED = new Set(["step", "round", "training", "trained", "interrupted"]), STOPS = new Set(["round", "trained", "interrupted", "scheduler"]);
  function takeEvents(more) {
    events.push(...more); if (events.length > MOST_EVENTS) events.splice(0, events.length - MOST_EVENTS);
    for (const event of more) {
      if (STEPPED.has(event.kind)) steps.push([event.at, event.step || 0]);
      if (STOPS.has(event.kind) && !event.gently && steps.length) steps.push([event.at, null]);
    }
    if (steps.length > MOST_POINTS) steps.splice(0, steps.length - MOST_POINTS);
    dirty = true;
  }
  function takeState(told) {
    state = told; skew = told.now - Date.now() / 1000; alive = true;
    const last = told.loss?.[0];
    while (last && losses.length && losses[losses.length - 1][0] > last[0]) { losses.pop(); dirty = true; } // steps that were rolled back
    if (last && (!losses.length || last[0] > losses[losses.length - 1][0])) { losses.push(last); if (losses.length > MOST_POINTS) losses.shift(); dirty = true; }
    paint();
  }
  function takeAll(all) { events = []; steps = all.steps; losses = all.losses; takeEvents([]); events = all.events; takeState({ ...all.state, loss: [] }); }

  // ---- actions
  function choose(node) { chosen = node; drawn.who = drawn.facts = null; $("log").textContent = ""; paintRanks(); readLog(); }
  async function readLog() {
    if (chosen === null) return;
    const node = chosen;
    let text = "";
    if (embedded) text = embedded.logs[`worker_${node}`] ?? "";
    else try { const answer = await fetch(`api/log?name=worker_${encodeURIComponent(node)}`); text = answer.ok ? await answer.text() : ""; } catch { return; }
    if (chosen !== node) return;
    const box = $("log"), atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
    if (box.textContent !== (text || word("nolog"))) { box.textContent = text || word("nolog"); if (atEnd) box.scrollTop = box.scrollHeight; }
  }
  $("ranks").addEventListener("click", (event) => { const cell = event.target.closest(".rank"); if (cell) choose(chosen === cell.dataset.node ? null : cell.dataset.node); });
  $("ranks").addEventListener("keydown", (event) => {
    const cells = cellsIn(), at = cells.indexOf(document.activeElement);
    if (at < 0) return;
    const wide = Math.max(1, cells.filter((cell) => cell.offsetTop === cells[0].offsetTop).length);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + wide, ArrowUp: at - wide, Home: 0, End: cells.length - 1 }[event.key];
    if (event.key === "Escape") choose(null);
    if (to === undefined || !cells[to]) return;
    event.preventDefault(); cells[at].tabIndex = -1; cells[to].tabIndex = 0; cells[to].focus();
  });
  $("close").addEventListener("click", () => choose(null));
  async function act(deed) {
    const what = deed === "drill" ? word(deed) : `${word(deed)}: ${chosen}`;
    if ((deed !== "drill" && chosen === null) || !confirm(`${what}\n\n${word("sure")}`)) return;
    let text;
    try {
      const order = deed === "drill" ? { do: deed } : { do: deed, node: chosen };
      const answer = await fetch("api/act", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(order) });
      text = await answer.text();
    } catch { text = word("gone"); }
    $("done").hidden = false; $("done").textContent = text.trim();
  }
  const deeds = [...document.querySelectorAll("[data-deed]")];
  for (const button of deeds) button.addEventListener("click", () => act(button.dataset.deed));
  async function askWhatMayBeDone() {
    try { const answer = await fetch("api/health"); const may = answer.ok && (await answer.json()).may_act; for (const button of deeds) button.hidden = !may; } catch { /* the stream reports it */ }
  }
  $("filter").addEventListener("input", () => paintEvents());
  $("kind").addEventListener("change", () => paintEvents());
  $("language").addEventListener("click", () => { language = language === "zh" ? "en" : "zh"; keep(); dress(); });
  $("theme").addEventListener("click", () => { theme = theme === "dark" ? "light" : "dark"; keep(); dress(); });

  // ---- start
  async function begin() {
    const answer = await fetch("api/everything");
    if (!answer.ok) throw new Error(String(answer.status));
    takeAll(await answer.json());
  }
  function listen() {
    const source = new EventSource("api/stream");
    source.addEventListener("open", () => { askWhatMayBeDone(); begin().catch(() => undefined); });
    source.addEventListener("state", (event) => takeState(JSON.parse(event.data)));
    source.addEventListener("events", (event) => { takeEvents(JSON.parse(event.data)); });
    source.addEventListener("anew", () => begin().catch(() => undefined));
    source.addEventListener("error", () => { alive = false; paint(); if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2000); });
  }
  function showExtra() {
    const box = $("extra"); box.hidden = false;
    box.append(make("h2", "", word("versions")), make("pre", "", JSON.stringify(embedded.about, null, 2)));
  }
  dress();
  if (embedded) { $("report").remove(); takeAll(embedded); showExtra(); } else { listen(); setInterval(readLog, 2000); setInterval(paint, 1000); }
})();

"use strict";
/* The status page: asks every two seconds and shows text only as text. */

const REFRESH_MS = 2000;
const TAIL_BYTES = 32768;
const LIVE = new Set(["queued", "starting", "running", "stopping", "paused"]);
const byId = (id) => document.getElementById(id);

let selected = decodeURIComponent(location.hash.slice(1)) || null;
let seenAt = null;
let log = { job: null, attempt: null, offset: 0, decoder: null };

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined && text !== null) made.textContent = text;
  return made;
}

async function ask(path, options) {
  const answer = await fetch(path, options);
  if (answer.status === 401) throw new Error("signed out; run `eyas login` for a new link");
  if (answer.status === 403) throw new Error((await answer.json()).detail);
  if (!answer.ok) throw new Error(`the daemon answered ${answer.status}`);
  return answer;
}

const askJson = async (path) => (await ask(path)).json();

function duration(seconds) {
  if (seconds === null) return null;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

function number(value, digits = 4) {
  if (typeof value !== "number") return null;
  const small = value !== 0 && Math.abs(value) < 0.001;
  return small ? Number(value.toPrecision(digits)).toExponential() : Number(value.toPrecision(digits)).toString();
}

function verdictOf(path, verdict) {
  const name = path.replace(/\/+$/, "").split("/").pop();
  return element("span", `verdict ${verdict || ""}`, `checkpoint ${name} ${verdict || "not judged yet"}`);
}

function stateOf(job) {
  return element("span", `state ${job.state}`, job.health && job.health !== "ok" ? `${job.state}, ${job.health}` : job.state);
}

function bar(job) {
  const made = element("progress");
  made.max = job.steps;
  made.value = job.step;
  made.setAttribute("aria-label", `${job.step} of ${job.steps} steps`);
  return made;
}

function jobRow(job) {
  const item = element("li");
  const button = element("button");
  button.type = "button";
  button.dataset.id = job.id;
  button.setAttribute("aria-current", String(job.id === selected));
  const top = element("div", "line");
  top.append(element("span", "name", job.name), element("span", "stage faint small", job.stage), stateOf(job));
  button.append(top);
  if (job.steps && job.step !== null && LIVE.has(job.state)) button.append(bar(job));
  const facts = [];
  if (job.epoch !== null && job.epochs) facts.push(`epoch ${job.epoch + 1} of ${job.epochs}`);
  if (job.steps && job.step !== null) facts.push(`${job.step} of ${job.steps}`);
  if (job.loss !== null) facts.push(`loss ${number(job.loss)}`);
  if (job.eta_s !== null) facts.push(`${duration(job.eta_s)} left`);
  if (job.warnings_total) facts.push(`${job.warnings_total} warnings`);
  const bottom = element("div", "line small wrap");
  bottom.append(element("span", "faint", facts.length && LIVE.has(job.state) && job.state !== "queued" ? facts.join(" · ") : job.summary));
  // The summary of an ended job names its last checkpoint already.
  if (job.last_checkpoint && LIVE.has(job.state)) {
    bottom.append(verdictOf(job.last_checkpoint.path, job.last_checkpoint.verdict));
  }
  button.append(bottom);
  item.append(button);
  return item;
}

function showJobs(jobs) {
  const focused = document.activeElement?.dataset?.id;
  byId("no-jobs").hidden = jobs.length > 0;
  byId("jobs").replaceChildren(...jobs.map(jobRow));
  if (focused) byId("jobs").querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}

const gib = (bytes) => (bytes === null ? "?" : (bytes / 2 ** 30).toFixed(1));

function gpuLine(gpu) {
  const label = gpu.instance === null ? `GPU ${gpu.index}` : `GPU ${gpu.index}:${gpu.instance}`;
  const facts = [gpu.name, gpu.lost];
  if (!gpu.lost) {
    facts.push(`${gib(gpu.memory_used)} of ${gib(gpu.memory_total)} GiB`);
    if (gpu.utilization_percent !== null) facts.push(`${gpu.utilization_percent} %`);
    if (gpu.temperature_c !== null) facts.push(`${gpu.temperature_c} °C`);
    if (gpu.power_w !== null) facts.push(`${Math.round(gpu.power_w)} W`);
    facts.push(gpu.job ? `job ${gpu.job}` : gpu.in_the_way);
  }
  return element("li", gpu.lost ? "small bad" : "small", `${label}: ${facts.filter(Boolean).join(" · ")}`);
}

function showHost({ host, reason }, gpus) {
  byId("host").hidden = !host;
  if (!host) return;
  const facts = [];
  if (host.cpu_percent !== null) facts.push(`CPU ${host.cpu_percent} % of ${host.cpus}`);
  if (host.ram_used !== null) facts.push(`memory ${gib(host.ram_used)} of ${gib(host.ram_total)} GiB`);
  for (const disk of host.disks) facts.push(disk.reason ? `${disk.path}: ${disk.reason}` : `${disk.path} ${gib(disk.free)} GiB free`);
  byId("host").querySelector("p").textContent = [...facts, reason].filter(Boolean).join(" · ");
  const lines = gpus.gpus.map(gpuLine);
  if (gpus.reason && gpus.reason !== reason) lines.push(element("li", "small bad", gpus.reason));
  byId("host").querySelector("ul").replaceChildren(...lines);
}

function pairs(list, entries) {
  list.replaceChildren(
    ...entries
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .flatMap(([name, value]) => [element("dt", "", name), element("dd", "", String(value))]),
  );
}

/* The plain values of a result; what is nested in it stands elsewhere on the page or in the answer of the API. */
function resultPairs(result) {
  const plain = (value) => ["string", "number", "boolean"].includes(typeof value);
  return Object.entries(result?.data ?? {})
    .filter(([, value]) => plain(value))
    .map(([name, value]) => [(name[0].toUpperCase() + name.slice(1)).replaceAll("_", " "), typeof value === "number" ? number(value, 6) : value]);
}

function showJob(job) {
  byId("detail").hidden = false;
  byId("detail-title").textContent = `${job.name} (${job.id})`;
  byId("detail-summary").textContent = job.summary;
  byId("detail-summary").className = job.state === "failed" ? "bad" : "";
  byId("detail-hint").textContent = job.hint || "";
  byId("detail-hint").hidden = !job.hint;
  byId("cancel").hidden = !LIVE.has(job.state);
  pairs(byId("facts"), [
    ["Phase", job.state === "succeeded" ? null : job.phase],
    ["Epoch", job.epoch === null ? null : `${job.epoch + 1}${job.epochs ? ` of ${job.epochs}` : ""}`],
    [job.unit && job.unit !== "steps" ? `Progress (${job.unit})` : "Step", job.steps ? `${job.step} of ${job.steps}` : job.step],
    ["Loss", number(job.loss)],
    ["Accuracy by step", job.accuracy ? job.accuracy.map((one) => number(one, 3) ?? "–").join(", ") : null],
    ["Learning rate", number(job.lr, 3)],
    ["Tokens/s", number(job.tokens_per_s)],
    ["Elapsed", duration(job.elapsed_s)],
    ["Left, about", duration(job.eta_s)],
    ["GPUs", job.gpus.map((gpu) => `${gpu.index} (${gpu.uuid})`).join(", ")],
    ["Output", job.output_dir],
    ...resultPairs(job.result),
  ]);
  showEpochs(job.epochs_done);
  byId("warnings").hidden = !job.warnings.length;
  byId("warnings").querySelector("ul").replaceChildren(
    ...job.warnings.map((one) => element("li", "small hint", `${one.code}: ${one.message}${one.count > 1 ? ` (${one.count} times)` : ""}`)),
  );
  byId("setup").hidden = !job.setup.length;
  pairs(byId("setup").querySelector("dl"), job.setup.map((fact) => [fact.title, fact.text]));
}

function cells(tag, values) {
  const row = element("tr");
  row.append(...values.map((value) => element(tag, "", value)));
  return row;
}

function showEpochs(epochs) {
  byId("epochs").hidden = !epochs.length;
  const lossOf = (metrics) => (metrics && typeof metrics.loss === "number" ? number(metrics.loss) : "–");
  byId("epochs").querySelector("thead").replaceChildren(cells("th", ["Epoch", "Training", "Loss", "Validation", "Loss"]));
  byId("epochs").querySelector("tbody").replaceChildren(
    ...epochs.map((one) => cells("td", [one.epoch + 1, duration(one.train_s), lossOf(one.train), duration(one.val_s), lossOf(one.val)])),
  );
}

function showCheckpoints(checkpoints) {
  byId("checkpoints").hidden = !checkpoints.length;
  const newest = checkpoints.findLast((one) => one.verdict && !one.removed_at);
  byId("checkpoints").querySelector("ul").replaceChildren(
    ...checkpoints.toReversed().map((one) => {
      const item = element("li", "small");
      const top = element("div", "line");
      top.append(element("span", "", one.path), element("span", `verdict ${one.verdict || ""}`, one.removed_at ? `${one.verdict || ""} removed` : one.verdict || "not judged yet"));
      item.append(top);
      if (one.removed_at) return item;
      for (const finding of one.findings.filter((found) => one === newest || found.severity !== "info")) {
        const tensor = finding.tensor && !finding.message.includes(finding.tensor) ? finding.tensor : null;
        item.append(element("div", finding.severity === "info" ? "faint" : "hint", [finding.code, finding.file, tensor, finding.message].filter(Boolean).join(": ")));
      }
      if (one !== newest) return item;
      const loads = one.servers.filter((server) => server.outcome === "loads").map((server) => server.version);
      if (loads.length) item.append(element("div", "faint", `served right by ${loads.join("; ")}`));
      for (const server of one.servers.filter((server) => server.outcome !== "loads")) {
        const reasons = server.reasons.filter((reason) => reason.effect !== "note").map((reason) => reason.message);
        item.append(element("div", "hint", [`${server.version} ${server.outcome.replace("_", " ")}`, ...reasons].join(": ")));
      }
      return item;
    }),
  );
}

/* As a terminal would leave it: no colours, and of a progress bar drawn over itself the last drawing. */
function readable(text) {
  return text.replace(/\x1b\[[0-9;?]*[A-Za-z]/g, "").replace(/[^\n\r]*\r+(?=[^\n\r])/g, "");
}

async function showLog(job) {
  const pane = byId("log");
  if (log.job !== job.id || log.attempt !== job.attempt) {
    pane.textContent = "";
    log = { job: job.id, attempt: job.attempt, offset: 0, decoder: new TextDecoder() };
    const size = Number((await ask(`/jobs/${encodeURIComponent(job.id)}/log?limit=0`)).headers.get("X-Log-Size"));
    log.offset = Math.max(0, size - TAIL_BYTES);
  }
  const mine = log;
  const answer = await ask(`/jobs/${encodeURIComponent(job.id)}/log?offset=${mine.offset}&limit=${TAIL_BYTES}`);
  const bytes = await answer.arrayBuffer();
  if (mine !== log || !bytes.byteLength) return;
  log.offset = Number(answer.headers.get("X-Next-Offset"));
  const atEnd = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 40;
  pane.textContent = readable(pane.textContent + log.decoder.decode(bytes, { stream: true })).slice(-4 * TAIL_BYTES);
  if (atEnd) pane.scrollTop = pane.scrollHeight;
}

async function refresh() {
  try {
    const { jobs } = await askJson("/jobs?limit=50");
    if (!selected && jobs.length) selected = (jobs.find((job) => job.state === "running") || jobs[0]).id;
    showJobs(jobs);
    showHost(...(await Promise.all([askJson("/host"), askJson("/gpus")])));
    if (selected) {
      const wanted = selected;
      const path = `/jobs/${encodeURIComponent(wanted)}`;
      const [job, { checkpoints }] = await Promise.all([askJson(path), askJson(`${path}/checkpoints`)]);
      if (wanted === selected) {
        showJob(job);
        showCheckpoints(checkpoints);
        await showLog(job);
      }
    }
    seenAt = new Date().toLocaleTimeString();
    say(`as of ${seenAt}`, false);
  } catch (error) {
    const what = error instanceof TypeError ? "the daemon does not answer" : error.message;
    say(seenAt ? `${what}; this is as of ${seenAt}` : what, true);
  }
}

function say(text, bad) {
  byId("freshness").textContent = text;
  byId("freshness").className = bad ? "bad" : "faint";
}

byId("jobs").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  selected = button.dataset.id;
  history.replaceState(null, "", `#${encodeURIComponent(selected)}`);
  // In one column the job is shown below the whole list.
  refresh().then(() => byId("detail").getBoundingClientRect().top > innerHeight / 2 && byId("detail").scrollIntoView());
});

byId("cancel").addEventListener("click", async () => {
  if (!selected || !window.confirm("Cancel this job?")) return;
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" };
  try {
    await ask(`/jobs/${encodeURIComponent(selected)}/cancel`, options);
  } catch (error) {
    say(error.message, true);
    return;
  }
  refresh();
});

async function keepFresh() {
  await refresh();
  setTimeout(keepFresh, REFRESH_MS);
}

keepFresh();

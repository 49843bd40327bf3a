// Keeps the page up to date by server-sent events, and sends the decisions of its buttons.
const names = ["state", "trouble", "streams", "connections", "followers", "facts"];  // of events, and of parts of the page
const parts = Object.fromEntries(names.map((id) => [id, document.getElementById(id)]));
const { state, trouble, streams, facts } = parts;
const follow = document.getElementById("follow");
let events;
let ready = state.innerHTML;  // what the process has sent last
let notice = 0;  // the timer of a text that is shown in its place

function connect() {
  events?.close();
  if (document.hidden) return;
  events = new EventSource(streams.dataset.events + (follow.querySelector("input").checked ? facts.dataset.followed : ""));
  events.onerror = ({ target }) => {
    state.textContent = "no connection to this process; trying again";
    if (target.readyState === EventSource.CLOSED) setTimeout(connect, 5000);  // it was refused, as by a process that stops
  };
  for (const [name, part] of Object.entries(parts)) {
    events.addEventListener(name, (event) => show(part, JSON.parse(event.data)));
  }
  events.addEventListener("cells", (event) => {
    for (const [name, cells] of Object.entries(JSON.parse(event.data))) {
      const { rows } = parts[name].querySelector("tbody");
      for (const [row, cell, html] of cells) rows[row].cells[cell].innerHTML = html;
    }
  });
}

// Replaces a part; the process has escaped every name, row and error.  Keyboard and scroll bars stay where they are.
function show(part, html) {
  if (part === state) {
    ready = html;
    if (notice) return;  // what was decided is shown for a while
  }
  const named = (each) => each.id || each.ariaLabel || each.href;
  const kept = part.contains(document.activeElement) && named(document.activeElement);
  const places = new Map([...part.querySelectorAll(".wide")].map((each) => [named(each), [each.scrollLeft, each.scrollTop]]));
  part.innerHTML = html;
  for (const each of part.querySelectorAll(".wide")) each.scrollTo(...(places.get(named(each)) ?? [0, 0]));
  if (kept) [...part.querySelectorAll("a, button, [tabindex]")].find((each) => named(each) === kept)?.focus({ preventScroll: true });
}

follow.hidden = !facts.dataset.followed;
follow.addEventListener("change", connect);
document.addEventListener("visibilitychange", connect);
connect();

trouble.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-decision]");
  if (!button) return;
  const { decision, stream, writer, token } = button.dataset;
  if (!confirm(`Leave out fact ${token} of ${writer} on ${stream}?`)) return;
  button.disabled = true;
  const answer = await fetch(`v1/streams/${encodeURIComponent(stream)}/${decision}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ instance: writer, token: Number(token) }),
  });
  state.textContent = answer.ok ? `fact ${token} is left out` : (await answer.json()).detail;
  clearTimeout(notice);
  notice = setTimeout(() => {
    notice = 0;
    show(state, ready);
  }, 5000);
  button.disabled = false;
});

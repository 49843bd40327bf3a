// Keeps the tables of the page up to date by server-sent events, and sends the decisions of its buttons.
const tables = document.getElementById("tables");
const state = document.getElementById("state");
const ready = state.textContent;

const events = new EventSource(tables.dataset.events);
events.onopen = () => { state.textContent = ready; };
events.onerror = () => { state.textContent = "no connection to this process; trying again"; };
events.onmessage = (event) => {
  const focused = document.activeElement?.id;
  tables.innerHTML = JSON.parse(event.data);  // the process has escaped every name, row and error
  if (focused) document.getElementById(focused)?.focus();
};

const facts = document.getElementById("facts");
const follow = document.getElementById("follow");
if (facts.dataset.source) {
  follow.hidden = false;
  setInterval(async () => {
    if (document.hidden || !follow.querySelector("input").checked) return;
    const answer = await fetch(facts.dataset.source).catch(() => null);
    if (answer?.ok) facts.innerHTML = await answer.text();
  }, 2000);
}

tables.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-decision]");
  if (!button) return;
  const { decision, stream, writer, token } = button.dataset;
  if (!confirm(`${decision} fact ${token} of ${writer} on ${stream}?`)) return;
  button.disabled = true;
  const answer = await fetch(`v1/streams/${encodeURIComponent(stream)}/${decision}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ instance: writer, token: Number(token) }),
  });
  state.textContent = answer.ok ? `${decision} of fact ${token}: done` : (await answer.json()).detail;
  button.disabled = false;
});

// Receives the snapshots of one event stream, and opens it again after it has ended.
const RETRY_MS = 2000;
const PATH = "/live/events";

export class Stream {
  #handlers;
  #source = null;
  #timer = 0;
  #question = new AbortController();

  // handlers: `history` and `snapshot` get values; `refused` gets the gateway's message; empty: no answer.
  constructor(handlers) {
    this.#handlers = handlers;
  }

  open() {
    this.close();
    const source = new EventSource(PATH);
    this.#source = source;
    for (const name of ["history", "snapshot"]) source.addEventListener(name, (event) => this.#handlers[name](JSON.parse(event.data)));
    source.onerror = () => { if (source === this.#source && source.readyState === EventSource.CLOSED) this.#retry(); };
  }

  close() {
    clearTimeout(this.#timer);
    this.#question.abort();
    if (this.#source) this.#source.close();
    this.#source = null;
  }

  #retry() {
    this.close();
    this.#ask();
  }

  // An EventSource does not tell why it was refused, so the same path is read once. That takes a viewer's place
  // for a moment, so the stream is opened later.
  async #ask() {
    const question = new AbortController();
    this.#question = question;
    try {
      const answer = await fetch(PATH, { cache: "no-store", signal: question.signal });
      if (answer.status === 401) return void location.assign("/login");
      if (answer.ok) {
        question.abort();
        this.#timer = setTimeout(() => this.open(), RETRY_MS);
        return;
      }
      const message = await messageOf(answer);
      if (!question.signal.aborted) this.#handlers.refused(message);
    } catch { // the gateway does not answer
      if (!question.signal.aborted) this.#handlers.refused("");
    }
    if (!question.signal.aborted) this.#timer = setTimeout(() => this.#ask(), RETRY_MS);
  }
}

// Returns the message of an error's body, or its status.
export async function messageOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the gateway answers with status ${answer.status}`;
  }
}

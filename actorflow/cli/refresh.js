"use strict";
// Asks for this page again every few seconds and puts in what has changed. What is open, chosen,
// focused or scrolled stays: nodes are kept, and only their texts and attributes are written anew.
(() => {
  const INTERVAL_MS = 5000;
  const OF_READER = new Set(["open", "checked"]);
  const news = document.getElementById("news");
  const refresh = document.getElementById("refresh");

  const putAttributes = (old, fresh) => {
    for (const name of old.getAttributeNames()) {
      if (!OF_READER.has(name) && !fresh.hasAttribute(name)) old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (!OF_READER.has(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
  };

  const put = (old, fresh) => {
    if (old.isEqualNode(fresh)) return;
    if (old.nodeName !== fresh.nodeName) {
      old.replaceWith(fresh);
    } else if (old.nodeType === Node.TEXT_NODE) {
      old.data = fresh.data;
    } else {
      putAttributes(old, fresh);
      const kept = [...old.childNodes], children = [...fresh.childNodes];
      children.forEach((child, i) => i < kept.length ? put(kept[i], child) : old.append(child));
      kept.slice(children.length).forEach((child) => child.remove());
    }
  };

  // Chosen runs, and folds by their title and which of that title they are.
  const boxes = () =>
    [...document.querySelectorAll("input[name=run]")].map((box) => [box.value, box, "checked"]);
  const folds = () => {
    const count = {};
    return [...document.querySelectorAll("details")].map((fold) => {
      const title = fold.firstChild.textContent;
      count[title] = (count[title] || 0) + 1;
      return [`${title} ${count[title]}`, fold, "open"];
    });
  };

  const show = (page) => {
    const isSet = new Map([...boxes(), ...folds()].map(([key, item, state]) => [key, item[state]]));
    put(document.querySelector("main"), page.querySelector("main"));
    // What was kept may have moved: it is another run's row, or another fold.
    for (const [key, item, state] of [...boxes(), ...folds()]) item[state] = isSet.get(key) === true;
  };

  const ask = async () => {
    if (document.hidden || !refresh.checked) return;
    try {
      const reply = await fetch(location.href, { cache: "no-store" });
      const body = await reply.text();
      const isPage = (reply.headers.get("Content-Type") || "").startsWith("text/html");
      if (isPage) show(new DOMParser().parseFromString(body, "text/html"));
      news.textContent = isPage ? "" : body;
    } catch {
      news.textContent = "No answer: the server has ended. This is what it said last.";
    }
  };

  const loop = async () => {
    await ask();
    setTimeout(loop, INTERVAL_MS);
  };
  setTimeout(loop, INTERVAL_MS);
})();

// Search in a site that is read from files. Browsers start no worker from a file, so its script runs
// in a frame that nobody sees.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.onload = () => this.begin(this.frame.contentWindow);
      const script = document.createElement("script");
      script.src = url;
      this.frame.srcdoc = script.outerHTML;
      document.body.append(this.frame);
    }

    begin(scope) {
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.send = (data) => scope.dispatchEvent(new scope.MessageEvent("message", { data }));
      this.waiting.splice(0).forEach(this.send);
    }

    postMessage(data) {
      this.send ? this.send(data) : this.waiting.push(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}


const first = data.maps[0];
document.title = `memory map of ${first.title}`;
element("h1", document.body, `Memory map of plan ${first.title}`);
const views = drawMaps(document.body);
keepDrawn(() => views.forEach(view => view.draw()));
document.body.dataset.boxes = data.maps.map(map => map.boxes.length).join(" ");

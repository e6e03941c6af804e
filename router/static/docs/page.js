// The API reference: Swagger UI over /openapi.json. The API key is the chat page's, stored in this tab only.
const $ = (id) => document.getElementById(id);
const NAME = "diptych.key";

function keyOf() {
  try { return sessionStorage.getItem(NAME) ?? ""; } catch { return ""; }
}

const headers = () => (keyOf() ? { Authorization: `Bearer ${keyOf()}` } : {});

async function show() {
  const reply = await fetch("/openapi.json", { headers: headers() }), body = await reply.json();
  $("unlock").hidden = reply.status !== 401;
  if (reply.ok) {
    const requestInterceptor = (request) => Object.assign(request, { headers: { ...headers(), ...request.headers } });
    SwaggerUIBundle({ spec: body, dom_id: "#reference", deepLinking: true, defaultModelsExpandDepth: 0, requestInterceptor });
  } else {
    $("why").textContent = body.error.message;
    $("key").focus();
  }
}

$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  try { sessionStorage.setItem(NAME, $("key").value.trim()); } catch { /* the key cannot be stored */ }
  show();
});
show();

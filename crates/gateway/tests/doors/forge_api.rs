//! The API of the session's repositories: HTTPS on the name of the git remotes.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use harvest_gateway::{
    Authority, GatewayConfig,
    ledger::{ForgeAnswer, ForgeCall, ToolResult, Tools},
};
use harvest_proto::door::{DoorReply, DoorRequest, GIT_NAME};
use serde_json::Value;

use crate::{RecordingLedger, TestDoor, host_secrets::authority, policy};

/// Records what it is asked for.
#[derive(Default)]
struct Recorder(Mutex<Vec<ForgeCall>>);

#[async_trait]
impl Tools for Recorder {
    fn list(&self) -> Vec<Value> {
        Vec::new()
    }

    async fn call(&self, _: &str, _: Value) -> Option<ToolResult> {
        None
    }

    async fn forge(&self, call: ForgeCall) -> ForgeAnswer {
        self.0.lock().unwrap().push(call);
        let next = Some(vec![("page".to_owned(), "2".to_owned())]);
        ForgeAnswer { status: 200, is_json: true, body: b"[1]".to_vec(), next }
    }
}

struct Setup {
    door: TestDoor,
    recorder: Arc<Recorder>,
    client: reqwest::Client,
}

impl Setup {
    async fn new() -> Self {
        let authority: Arc<Authority> = Arc::new(authority());
        let root = reqwest::Certificate::from_pem(authority.pem().as_bytes()).unwrap();
        let config = GatewayConfig { authority: Some(authority), ..GatewayConfig::default() };
        let recorder = Arc::new(Recorder::default());
        let tools = Some(Arc::clone(&recorder) as Arc<dyn Tools>);
        let door = TestDoor::with_tools(RecordingLedger::default(), config, policy(&[]), tools);
        let inside = door.inside(GIT_NAME, 443).await;
        let client = reqwest::Client::builder()
            .no_proxy()
            .tls_certs_only([root])
            .resolve(GIT_NAME, inside)
            .build()
            .unwrap();
        Self { door, recorder, client }
    }

    fn url(path: &str) -> String {
        format!("https://{GIT_NAME}{path}")
    }

    fn calls(&self) -> Vec<ForgeCall> {
        self.recorder.0.lock().unwrap().clone()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_reach_the_forge_without_client_credentials() {
    let setup = Setup::new().await;
    let url = Setup::url("/api/v3/repos/acme/shop/pulls?state=all");
    let request =
        setup.client.get(url).header("authorization", "token mine").header("accept", "a/b");
    let answer = request.send().await.unwrap();
    let link = answer.headers()["link"].to_str().unwrap().to_owned();
    let expected =
        "<https://git.harvest.internal/api/v3/repos/acme/shop/pulls?page=2>; rel=\"next\"";
    assert_eq!((link.as_str(), answer.text().await.unwrap().as_str()), (expected, "[1]"));
    let read = ForgeCall::Read {
        path: ["repos", "acme", "shop", "pulls"].map(str::to_owned).into(),
        query: vec![("state".into(), "all".into())],
        accept: "a/b".into(),
    };
    assert_eq!(setup.calls(), [read]);
    let head = setup.client.head(Setup::url("/api/v3/repos/acme/shop")).send().await.unwrap();
    assert_eq!((head.status().as_u16(), head.text().await.unwrap().as_str()), (200, ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_and_long_bodies_reach_no_forge() {
    let setup = Setup::new().await;
    for (path, status) in [("/api/v3/repos/acme/shop/pulls", 403), ("/acme/shop.git/x", 404)] {
        let answer = setup.client.post(Setup::url(path)).body("{}").send().await.unwrap();
        assert_eq!(answer.status().as_u16(), status, "{path}");
        let body: Value = answer.json().await.unwrap();
        assert!(body["message"].is_string(), "{body}");
    }
    let body = reqwest::Body::wrap_stream(futures_util::stream::iter(
        std::iter::repeat_with(|| Ok::<_, std::io::Error>(vec![b' '; 64 * 1024])).take(1600),
    ));
    // A hundred megabytes: the connection may end before all of it is sent.
    if let Ok(answer) = setup.client.post(Setup::url("/api/graphql")).body(body).send().await {
        assert_eq!(answer.status().as_u16(), 413);
    }
    assert_eq!(setup.calls(), []);
    let small = setup.client.post(Setup::url("/api/graphql")).body("{}").send().await.unwrap();
    assert_eq!(small.status().as_u16(), 200);
    assert_eq!(setup.calls(), [ForgeCall::Graphql { body: b"{}".to_vec() }]);
}

#[tokio::test(flavor = "multi_thread")]
async fn api_is_only_at_the_name_of_git() {
    let setup = Setup::new().await;
    for name in ["model.harvest.internal", "mcp.harvest.internal", "github.com"] {
        let request = DoorRequest::Connect { name: name.to_owned(), port: 443 };
        let (reply, _) = setup.door.request(&request).await;
        assert!(matches!(reply, DoorReply::Refused { .. }), "{name}");
    }
}

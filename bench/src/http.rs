//! The HTTP row: from the request for a new sandbox to the first byte of its command's output. The
//! whole server runs in this process, with store and token, on loopback; the connection exists
//! already.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, bail};
use harvest_forge::LocalForge;
use harvest_gateway::{Gateway, GatewayConfig, vault::Vault};
use harvest_images::{Import, UnpackLimits};
use harvest_proto::{api::Role, bridge::Author};
use harvest_providers::{Local, local::Recipes};
use harvest_server::ServerState;
use harvest_session::{Config, Dependencies, ServerParts, Store, StoreLedger};
use serde_json::json;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use crate::{
    runner::Benchmark,
    workspace::{MEMORY_BYTES, PIDS, Workspace},
};

/// Until the first output; the sandbox is removed afterwards, unmeasured.
pub(crate) const FIRST_OUTPUT: &str = "harvest HTTP: create → first output";

const IMAGE: &str = "bench";

pub(crate) fn benchmark(workspace: &Workspace) -> Result<Benchmark<'_>> {
    let rootfs = workspace.rootfs();
    let folder = Import::Folder(&rootfs);
    harvest_images::import(&workspace.engine, IMAGE, folder, UnpackLimits::default(), &mut |_| {})?;
    let mut server = Server::start(workspace)?;
    Ok(Benchmark::parts(&[FIRST_OUTPUT], move || Ok(vec![server.first_output()?])))
}

struct Server {
    connection: BufReader<TcpStream>,
    request: String,
    // Dropping the runtime stops the server.
    _runtime: Runtime,
}

impl Server {
    fn start(workspace: &Workspace) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let (address, token) = runtime.block_on(serve(workspace))?;
        let connection = TcpStream::connect(address)?;
        connection.set_nodelay(true)?;
        let body = json!({
            "argv": ["/bin/echo", "x"],
            "sandbox": {
                "image": IMAGE, "state": false,
                "limits": { "memory_bytes": MEMORY_BYTES, "pids": PIDS },
            },
        })
        .to_string();
        let request = format!(
            "POST /v1/exec HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {token}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        Ok(Self { connection: BufReader::new(connection), request, _runtime: runtime })
    }

    fn first_output(&mut self) -> Result<Duration> {
        let began = Instant::now();
        self.connection.get_mut().write_all(self.request.as_bytes())?;
        let mut line = String::new();
        loop {
            line.clear();
            if self.connection.read_line(&mut line)? == 0 || line.contains("\"failed\"") {
                bail!("the server replied `{}`", line.trim());
            }
            if line.contains("\"stdout\"") {
                break;
            }
        }
        let took = began.elapsed();
        self.finish()?;
        Ok(took)
    }

    /// Reads the rest of the chunked response, which ends when the sandbox is removed.
    fn finish(&mut self) -> Result<()> {
        let mut line = String::new();
        // The rest of the chunk that contained the line.
        self.connection.read_line(&mut line)?;
        loop {
            line.clear();
            self.connection.read_line(&mut line)?;
            let length = usize::from_str_radix(line.trim(), 16)
                .with_context(|| format!("not a chunk size: {line:?}"))?;
            let mut rest = vec![0; length + 2];
            self.connection.read_exact(&mut rest)?;
            if length == 0 {
                return Ok(());
            }
        }
    }
}

/// A server as `harvest up` builds it, without the routes of a forge.
async fn serve(workspace: &Workspace) -> Result<(std::net::SocketAddr, String)> {
    let folder = workspace.at("server");
    std::fs::create_dir(&folder)?;
    let store = Store::open(&folder.join("harvest.db")).await?;
    let lease = store.server_lease(SystemTime::now().into()).await?;
    let vault = Arc::new(Vault::open(&folder.join("vault.key"))?);
    let ledger = StoreLedger::new(store.clone(), lease, Arc::clone(&vault), None);
    let recipes_folder = folder.clone();
    let recipes =
        Recipes { names: Vec::new(), write_all: Arc::new(move || Ok(recipes_folder.clone())) };
    let parts = ServerParts::open(Dependencies {
        store,
        lease,
        provider: Arc::new(Local::new(workspace.engine.clone(), recipes)),
        doors: Arc::new(Gateway::new(Arc::new(ledger), GatewayConfig::default())),
        forge: Arc::new(LocalForge::open(folder.join("forge"), "http://127.0.0.1:1/forge")?),
        vault,
        config: Config::default(),
    })
    .await?;
    let user = Author { name: "Bench".into(), email: "bench@localhost".into() };
    let (_, token) = parts.accounts.token_create("bench", user, Role::Admin).await?;
    let state = ServerState::new(parts, &[], CancellationToken::new());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(harvest_server::serve(listener, state));
    Ok((address, token.expose().clone()))
}

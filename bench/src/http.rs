//! The API's own row: a fresh sandbox asked for over HTTP, until the first byte its command says. A whole
//! server in this process, store and token included, on loopback; the connection stands already.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, bail};
use harvest_engine::{Import, Limits, UnpackLimits};
use harvest_gateway::{Gateway, GatewayConfig, vault::Vault};
use harvest_github::Forge;
use harvest_proto::{api::Role, bridge::Author};
use harvest_providers::{Local, LocalMachines, machines::Recipes};
use harvest_server::ServerState;
use harvest_session::{Books, Config, Parts, Sessions, Store, machines::Commands};
use serde_json::json;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use crate::{
    contest::Contestant,
    place::{MEMORY_BYTES, PIDS, Place},
};

/// Asked for, made, started and heard of; the sandbox is removed after the clock has stopped.
pub(crate) const FIRST_OUTPUT: &str = "harvest HTTP: create → first output";

const IMAGE: &str = "bench";

/// The row of the API.
pub(crate) fn contestant(place: &Place) -> Result<Contestant<'_>> {
    let rootfs = place.rootfs();
    let folder = Import::Folder(&rootfs);
    place.engine.image_import(IMAGE, folder, UnpackLimits::default(), &mut |_| {})?;
    let mut server = Server::start(place)?;
    Ok(Contestant::parts(&[FIRST_OUTPUT], move || Ok(vec![server.first_output()?])))
}

struct Server {
    connection: BufReader<TcpStream>,
    request: String,
    // The server goes with it.
    _runtime: Runtime,
}

impl Server {
    fn start(place: &Place) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let (address, token) = runtime.block_on(serve(place))?;
        let connection = TcpStream::connect(address)?;
        connection.set_nodelay(true)?;
        let body = json!({
            "image": IMAGE, "state": false, "argv": ["/bin/echo", "x"],
            "limits": { "memory_bytes": MEMORY_BYTES, "pids": PIDS },
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
                bail!("the server answered `{}`", line.trim());
            }
            if line.contains("\"stdout\"") {
                break;
            }
        }
        let took = began.elapsed();
        self.finish()?;
        Ok(took)
    }

    /// Reads the rest of a chunked answer; it ends when the sandbox is gone.
    fn finish(&mut self) -> Result<()> {
        let mut line = String::new();
        // What is left of the chunk that held the line.
        self.connection.read_line(&mut line)?;
        loop {
            line.clear();
            self.connection.read_line(&mut line)?;
            let length = usize::from_str_radix(line.trim(), 16)
                .with_context(|| format!("no chunk: {line:?}"))?;
            let mut rest = vec![0; length + 2];
            self.connection.read_exact(&mut rest)?;
            if length == 0 {
                return Ok(());
            }
        }
    }
}

/// A server as `harvest up` puts it together, without a forge's routes.
async fn serve(place: &Place) -> Result<(std::net::SocketAddr, String)> {
    let folder = place.at("server");
    std::fs::create_dir(&folder)?;
    let store = Store::open(&folder.join("harvest.db")).await?;
    let lease = store.server_lease(SystemTime::now().into()).await?;
    let vault = Arc::new(Vault::open(&folder.join("vault.key"))?);
    let books = Books::new(store.clone(), lease, Arc::clone(&vault), None);
    let sessions = Sessions::open(Parts {
        store,
        lease,
        provider: Arc::new(Local::new(place.engine.clone(), Limits::default())),
        doors: Arc::new(Gateway::new(Arc::new(books), GatewayConfig::default())),
        pulls: Arc::new(Forge::open(folder.join("forge"), "http://127.0.0.1:1/forge")?),
        vault,
        config: Config::default(),
    })
    .await?;
    let user = Author { name: "Bench".into(), email: "bench@localhost".into() };
    let (_, token) = sessions.token_create("bench", user, Role::Admin).await?;
    let recipes = Recipes { names: Vec::new(), place: Arc::new(move || Ok(folder.clone())) };
    let machines = Commands::new(Arc::new(LocalMachines::new(place.engine.clone(), recipes)));
    let state = ServerState::new(sessions, &[], CancellationToken::new()).with_machines(machines);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(harvest_server::serve(listener, state));
    Ok((address, token.expose().clone()))
}

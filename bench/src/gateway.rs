//! The rows of the gateway: requests of a program inside a sandbox to a server on this machine,
//! and of the same program on the host, which connects directly.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use harvest_e2e::Host;
use harvest_proto::{SessionId, api::SessionState, bridge::Exit};
use serde_json::json;

use crate::{options::Options, report::Report, runner::Samples};

const INSIDE: &str = "gateway: connect and request, through the door";
const DIRECT: &str = "gateway: connect and request, direct";
const ADDED: &str = "gateway: added by the door, p50";
const RELAYED: &str = "gateway: 512 MiB relayed, through the door";
const RECEIVED: &str = "gateway: 512 MiB, direct";

const BIG_BYTES: usize = 512 * 1024 * 1024;
const REQUESTS: usize = 200;
// A name for the server, which resolves in this process's mount namespace only.
const NAME: &str = "server.bench.example";

/// Targets for p50, in milliseconds: 2 ms more per request, and 300 MB/s.
pub(crate) const LIMITS: [(&str, f64); 2] = [(ADDED, 2.0), (RELAYED, 1790.0)];

/// Prints the seconds of each request on a connection of its own; the first ones are not counted.
const CLIENT: &str = r#"
import json, socket, sys, time
name, port, path, count = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
buffer, taken = bytearray(1 << 20), []
for _ in range(count + 2):
    began = time.perf_counter()
    with socket.create_connection((name, port)) as server:
        server.sendall(f"GET {path} HTTP/1.1\r\nhost: {name}\r\n\r\n".encode())
        received = 0
        while read := server.recv_into(buffer):
            received += read
    taken.append(time.perf_counter() - began)
    assert path == "/" or received > 512 << 20, received
print(json.dumps(taken[2:]))
"#;

/// Whether a row belongs to this group.
pub(crate) fn is_row(name: &str) -> bool {
    name.starts_with("gateway: ")
}

/// Measures the rows and adds them to the report. `hosts` is the path of a new file.
pub(crate) fn run(hosts: &Path, options: &Options, report: &mut Report) -> Result<()> {
    let server = TcpListener::bind("127.0.0.1:0")?;
    let port = server.local_addr()?.port();
    thread::spawn(move || {
        for connection in server.incoming().flatten() {
            // The client's reads fail if this does.
            thread::spawn(move || drop(answer(connection)));
        }
    });
    name_the_server(hosts)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let rounds = if options.quick { 1 } else { 10 };
    let mut all = [INSIDE, DIRECT, RELAYED, RECEIVED]
        .map(|row| Samples { row, taken: Vec::<Duration>::new() });
    runtime.block_on(async {
        let host = Host::start().await;
        let rule = format!("{NAME}:{port}");
        let allowed = host.harvest(["net", "allow", "--everywhere", "--private", &rule]);
        ensure!(allowed.code == 0, "cannot allow {rule}: {}", allowed.stderr);
        let created = host.post("/v1/sessions", json!({ "agent": "scripted" })).await;
        let session: SessionId = created["id"].as_str().unwrap_or_default().parse()?;
        host.wait_for(&session, SessionState::Idle).await;
        for _ in 0..rounds {
            let requests = REQUESTS / rounds;
            all[0].taken.extend(inside(&host, &session, port, "/", requests).await?);
            all[1].taken.extend(direct(port, "/", requests)?);
            all[2].taken.extend(inside(&host, &session, port, "/big", 1).await?);
            all[3].taken.extend(direct(port, "/big", 1)?);
        }
        anyhow::Ok(())
    })?;
    let added = median(&all[0].taken).saturating_sub(median(&all[1].taken));
    report.add(all.into());
    report.add(vec![Samples { row: ADDED, taken: vec![added] }]);
    Ok(())
}

async fn inside(
    host: &Host,
    session: &SessionId,
    port: u16,
    path: &str,
    count: usize,
) -> Result<Vec<Duration>> {
    let command = format!("python3 -c '{CLIENT}' {NAME} {port} {path} {count}");
    let (exit, output) = host.exec(session, "harvest", &command).await;
    ensure!(exit == Exit::Code(0), "the client inside failed: {output}");
    parse(&output)
}

fn direct(port: u16, path: &str, count: usize) -> Result<Vec<Duration>> {
    let (port, count) = (port.to_string(), count.to_string());
    let output = Command::new("python3")
        .args(["-c", CLIENT, NAME, &port, path, &count])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run python3")?;
    ensure!(output.status.success(), "the client on the host failed");
    parse(&String::from_utf8_lossy(&output.stdout))
}

fn parse(output: &str) -> Result<Vec<Duration>> {
    let seconds: Vec<f64> =
        serde_json::from_str(output.trim()).context("not the client's times")?;
    Ok(seconds.into_iter().map(Duration::from_secs_f64).collect())
}

fn median(taken: &[Duration]) -> Duration {
    let mut sorted = taken.to_vec();
    sorted.sort();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

/// Adds the name to the hosts file as this process and its children see it.
fn name_the_server(hosts: &Path) -> Result<()> {
    let known = fs::read_to_string("/etc/hosts").unwrap_or_default();
    fs::write(hosts, format!("{known}\n127.0.0.1 {NAME}\n"))?;
    let mounted = Command::new("mount").arg("--bind").arg(hosts).arg("/etc/hosts").status()?;
    ensure!(mounted.success(), "cannot replace /etc/hosts");
    Ok(())
}

fn answer(connection: TcpStream) -> std::io::Result<()> {
    let mut lines = BufReader::new(connection.try_clone()?).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    for line in lines {
        if line?.is_empty() {
            break;
        }
    }
    let mut connection = connection;
    let length = if first.contains("/big") { BIG_BYTES } else { 2 };
    write!(connection, "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n")?;
    if length == 2 {
        return connection.write_all(b"ok");
    }
    let part = vec![0; 1024 * 1024];
    (0..BIG_BYTES / part.len()).try_for_each(|_| connection.write_all(&part))
}

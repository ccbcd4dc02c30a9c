//! A company's network on loopback: a mirror and a git host with a private certificate, which only
//! a proxy reaches. The proxy is tinyproxy, behind which another one knows where the names are.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
};

use harvest_e2e::eventually;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
};

/// Creates a certificate authority: `ca.pem` and `ca.key`.
pub(crate) fn certificate_authority(folder: &Path) {
    openssl(
        folder,
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=corp -keyout ca.key -out ca.pem",
    );
}

fn openssl(folder: &Path, arguments: &str) {
    run(Command::new("openssl").args(arguments.split(' ')).current_dir(folder));
}

fn run(command: &mut Command) {
    let done = command.output();
    assert!(done.as_ref().is_ok_and(|done| done.status.success()), "{command:?}: {done:?}");
}

/// Programs that end with the test.
pub(super) struct Corp {
    pub(super) folder: tempfile::TempDir,
    mirror: Child,
    tinyproxy: Child,
    /// Where tinyproxy listens.
    pub(super) proxy: String,
    /// The heads of the requests that reached the proxy behind tinyproxy.
    pub(super) seen: Arc<Mutex<Vec<String>>>,
}

impl Corp {
    pub(super) async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        certificate_authority(folder.path());
        let at = |name: &str| folder.path().join(name);
        fs::write(at("names"), "subjectAltName=DNS:mirror.corp.example,DNS:github.com").unwrap();
        openssl(
            folder.path(),
            "req -newkey rsa:2048 -nodes -subj /CN=mirror -keyout server.key -out server.csr",
        );
        openssl(
            folder.path(),
            "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out server.pem",
        );
        seed(folder.path());
        fs::write(at("mirror.py"), include_str!("mirror.py")).unwrap();
        let mut mirror = Command::new("python3")
            .args([at("mirror.py"), folder.path().to_owned()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut port = String::new();
        BufReader::new(mirror.stdout.take().unwrap()).read_line(&mut port).unwrap();
        let (inner, seen) = name_proxy(port.trim().parse().unwrap()).await;
        let (tinyproxy, port) = tinyproxy(folder.path(), inner).await;
        let proxy = format!("http://user:hidden@127.0.0.1:{port}");
        Self { folder, mirror, tinyproxy, proxy, seen }
    }
}

impl Drop for Corp {
    fn drop(&mut self) {
        for child in [&mut self.mirror, &mut self.tinyproxy] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn seed(folder: &Path) {
    let git = |arguments: &[&str]| {
        run(Command::new("git")
            .args(["-c", "user.name=A", "-c", "user.email=a@b.c"])
            .args(arguments)
            .current_dir(folder));
    };
    git(&["init", "-q", "-b", "main", "work"]);
    fs::write(folder.join("work/README"), "a public library\n").unwrap();
    git(&["-C", "work", "add", "."]);
    git(&["-C", "work", "commit", "-q", "-m", "first"]);
    git(&["clone", "-q", "--bare", "work", "lib.git"]);
}

/// A proxy of tunnels that leads every name to one port.
async fn name_proxy(server: u16) -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, seen) =
        (listener.local_addr().unwrap().port(), Arc::<Mutex<Vec<String>>>::default());
    let heads = Arc::clone(&seen);
    tokio::spawn(async move {
        while let Ok((mut inside, _)) = listener.accept().await {
            let heads = Arc::clone(&heads);
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(inside.read_u8().await?);
                }
                heads.lock().unwrap().push(String::from_utf8_lossy(&head).into_owned());
                let mut outside = TcpStream::connect(("127.0.0.1", server)).await?;
                inside.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
                copy_bidirectional(&mut inside, &mut outside).await
            });
        }
    });
    (port, seen)
}

async fn tinyproxy(folder: &Path, upstream: u16) -> (Child, u16) {
    // Another process may take the port meanwhile; then the wait below ends with an error.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let config = format!(
        "Port {port}\nListen 127.0.0.1\nTimeout 60\nMaxClients 50\nConnectPort 443\n\
         BasicAuth user hidden\nUpstream http 127.0.0.1:{upstream}\nLogFile \"{}\"\n",
        folder.join("tinyproxy.log").display()
    );
    fs::write(folder.join("tinyproxy.conf"), config).unwrap();
    let program = ["/usr/bin/tinyproxy", "/usr/sbin/tinyproxy"];
    let program = program.into_iter().find(|path| Path::new(path).exists()).expect("tinyproxy");
    let child = Command::new(program)
        .args(["-d", "-c"])
        .arg(folder.join("tinyproxy.conf"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    eventually("tinyproxy to listen", || async {
        TcpStream::connect(("127.0.0.1", port)).await.ok()
    })
    .await;
    (child, port)
}

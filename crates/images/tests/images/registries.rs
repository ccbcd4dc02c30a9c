//! Registries for tests: Debian's docker-registry, filled by skopeo, and a fake one that can lie,
//! hang and break. Both listen on loopback.

use std::{
    collections::HashMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command as HostCommand, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

pub(crate) fn digest(bytes: &[u8]) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA256, bytes);
    let hex: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// The parts of an image in a registry.
pub(crate) struct Documents {
    pub(crate) config: Vec<u8>,
    pub(crate) manifest: Vec<u8>,
    /// The layers as they are sent.
    pub(crate) layers: Vec<Vec<u8>>,
}

impl Documents {
    /// `layers`: plain tars, bottom first; `pack` compresses them.
    pub(crate) fn new(layers: &[Vec<u8>], kind: &str, pack: impl Fn(&[u8]) -> Vec<u8>) -> Self {
        let contents: Vec<String> = layers.iter().map(|layer| digest(layer)).collect();
        let runtime = serde_json::json!({
            "Env": ["PATH=/bin", "GREETING=hello"], "User": "10001:10001", "WorkingDir": "/work",
        });
        let config = serde_json::json!({
            "os": "linux", "architecture": "amd64", "config": runtime,
            "rootfs": { "type": "layers", "diff_ids": contents },
        });
        Self::with_config(
            config.to_string().into_bytes(),
            layers.iter().map(|layer| pack(layer)).collect(),
            kind,
        )
    }

    pub(crate) fn with_config(config: Vec<u8>, layers: Vec<Vec<u8>>, kind: &str) -> Self {
        let blob = |kind: &str, bytes: &[u8]| serde_json::json!({ "mediaType": kind, "digest": digest(bytes), "size": bytes.len() });
        let kind = format!("application/vnd.oci.image.layer.v1.tar{kind}");
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": blob("application/vnd.oci.image.config.v1+json", &config),
            "layers": layers.iter().map(|layer| blob(&kind, layer)).collect::<Vec<_>>(),
        });
        Self { config, manifest: manifest.to_string().into_bytes(), layers }
    }

    /// Writes an OCI layout for skopeo.
    pub(crate) fn write_layout(&self, folder: &Path) {
        let blobs = folder.join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        for bytes in self.layers.iter().chain([&self.config, &self.manifest]) {
            fs::write(blobs.join(&digest(bytes)[7..]), bytes).unwrap();
        }
        fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        let index = serde_json::json!({ "schemaVersion": 2, "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": digest(&self.manifest), "size": self.manifest.len(),
            "annotations": { "org.opencontainers.image.ref.name": "made" },
        }] });
        fs::write(folder.join("index.json"), index.to_string()).unwrap();
    }
}

/// Debian's docker-registry.
pub(crate) struct DebianRegistry {
    process: Child,
    pub(crate) host: String,
    folder: tempfile::TempDir,
}

/// The login of a registry with a password.
pub(crate) const LOGIN: &str = "user:open sesame";
// bcrypt with the fewest rounds.
const HTPASSWD: &str = "user:$2b$04$yEncnZj7ffQw5nAPOTEWPesgON.0YClommCIyYJct2OfVvs36HFAK\n";

impl DebianRegistry {
    pub(crate) fn start(with_password: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        fs::write(at.join("htpasswd"), HTPASSWD).unwrap();
        let auth = format!(
            "auth: {{htpasswd: {{realm: test, path: {}}}}}\n",
            at.join("htpasswd").display()
        );
        let config = format!(
            "version: 0.1\nlog: {{level: info}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
             http: {{addr: \"127.0.0.1:0\", secret: test}}\n{}",
            at.join("data").display(),
            if with_password { &auth } else { "" }
        );
        fs::write(at.join("config.yml"), config).unwrap();
        let mut process = HostCommand::new("docker-registry")
            .arg("serve")
            .arg(at.join("config.yml"))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("docker-registry");
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let address = lines.find_map(|line| {
            Some(line.ok()?.split_once("listening on ")?.1.split('"').next()?.to_owned())
        });
        // The registry blocks when its log is not read.
        thread::spawn(move || lines.for_each(drop));
        Self { process, host: address.expect("the registry listens"), folder }
    }

    /// Pushes an image with skopeo.
    pub(crate) fn fill(&self, image: &Documents, name: &str, options: &[&str]) {
        let layout = self.folder.path().join(name.replace([':', '/'], "-"));
        image.write_layout(&layout);
        let copied = HostCommand::new("skopeo")
            .args([
                "--insecure-policy",
                "copy",
                "--quiet",
                "--dest-tls-verify=false",
                "--dest-creds",
                LOGIN,
            ])
            .args(options)
            .arg(format!("oci:{}:made", layout.display()))
            .arg(format!("docker://{}/{name}", self.host))
            .output()
            .expect("skopeo");
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    }
}

impl Drop for DebianRegistry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) path: String,
    pub(crate) authorization: Option<String>,
}

/// The fake registry's reaction to a request.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    Bytes(Vec<u8>),
    /// Status, and headers as lines.
    Status(u16, String),
    /// Sends nothing and keeps the connection open.
    Hang,
    /// Sends half of the bytes and hangs.
    Half(Vec<u8>),
    /// Sends half of the bytes and closes the connection.
    Cut(Vec<u8>),
}

type Answers = dyn Fn(&Request, usize) -> Option<Reply> + Send + Sync;

/// A registry with scripted replies.
pub(crate) struct FakeRegistry {
    pub(crate) host: String,
    requests: Arc<Mutex<Vec<Request>>>,
    stopped: Arc<AtomicBool>,
}

impl FakeRegistry {
    /// `special` gets each request and the number of earlier requests for the same path. When it
    /// returns `None`, the reply comes from `image`, which has every tag.
    pub(crate) fn start(
        image: Option<&Documents>,
        special: impl Fn(&Request, usize) -> Option<Reply> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let mut blobs = HashMap::new();
        if let Some(image) = image {
            for bytes in image.layers.iter().chain([&image.config, &image.manifest]) {
                blobs.insert(digest(bytes), bytes.clone());
            }
            blobs.insert("tag".to_owned(), image.manifest.clone());
        }
        let requests = Arc::new(Mutex::new(Vec::new()));
        let stopped = Arc::new(AtomicBool::new(false));
        let special: Arc<Answers> = Arc::new(special);
        let (seen, end) = (Arc::clone(&requests), Arc::clone(&stopped));
        thread::spawn(move || {
            let blobs = Arc::new(blobs);
            let mut hanging = Vec::new();
            for stream in listener.incoming() {
                if end.load(Ordering::SeqCst) {
                    break;
                }
                let mut stream = stream.unwrap();
                let Some(request) = read_request(&mut stream) else { continue };
                let before = {
                    let mut seen = seen.lock().unwrap();
                    let before =
                        seen.iter().filter(|one: &&Request| one.path == request.path).count();
                    seen.push(request.clone());
                    before
                };
                let path = request.path.split('?').next().unwrap_or_default();
                let last = path.rsplit('/').next().unwrap_or_default();
                let plain = || {
                    let found = blobs.get(last).or_else(|| {
                        blobs.get("tag").filter(|_| request.path.contains("/manifests/"))
                    });
                    found.map_or(Reply::Status(404, String::new()), |bytes| {
                        Reply::Bytes(bytes.clone())
                    })
                };
                let reply = special(&request, before).unwrap_or_else(plain);
                let (head, body, stays) = match reply {
                    Reply::Bytes(bytes) => (head(200, bytes.len(), ""), bytes, false),
                    Reply::Status(status, headers) => {
                        (head(status, 0, &headers), Vec::new(), false)
                    }
                    Reply::Hang => (String::new(), Vec::new(), true),
                    Reply::Half(bytes) => {
                        (head(200, bytes.len(), ""), bytes[..bytes.len() / 2].to_vec(), true)
                    }
                    Reply::Cut(bytes) => {
                        (head(200, bytes.len(), ""), bytes[..bytes.len() / 2].to_vec(), false)
                    }
                };
                // The client may have closed the connection.
                let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
                if stays {
                    hanging.push(stream);
                }
            }
        });
        Self { host, requests, stopped }
    }

    pub(crate) fn image(image: &Documents) -> Self {
        Self::start(Some(image), |_, _| None)
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// The number of requests whose path contains `part`.
    pub(crate) fn count(&self, part: &str) -> usize {
        self.requests().iter().filter(|request| request.path.contains(part)).count()
    }
}

impl Drop for FakeRegistry {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        // Wakes the listener.
        let _ = TcpStream::connect(&self.host);
    }
}

fn head(status: u16, length: usize, headers: &str) -> String {
    format!("HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n")
}

fn read_request(stream: &mut TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut request = Request { path: first.split(' ').nth(1)?.to_owned(), authorization: None };
    for line in lines {
        let line = line.ok()?;
        if line.is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("authorization")
        {
            request.authorization = Some(value.trim().to_owned());
        }
    }
    Some(request)
}

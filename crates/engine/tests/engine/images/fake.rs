//! Registries that tests speak with: Debian's own, filled by skopeo, and a small one that lies, hangs and
//! breaks when asked to. Both listen on this machine only.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use super::super::*;

pub(crate) fn digest(bytes: &[u8]) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA256, bytes);
    let hex: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// A tar of everything in a folder, by the host's own program.
pub(crate) fn tar(folder: &Path) -> Vec<u8> {
    let made = HostCommand::new("tar")
        .args(["--numeric-owner", "-C"])
        .arg(folder)
        .args(["-c", "."])
        .output();
    let made = made.unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    made.stdout
}

/// An image as its documents: what a registry has of it.
pub(crate) struct Documents {
    pub(crate) config: Vec<u8>,
    pub(crate) manifest: Vec<u8>,
    /// Each layer as it is on the wire.
    pub(crate) layers: Vec<Vec<u8>>,
}

impl Documents {
    /// `layers`: plain tars, bottom first; `pack` is how they are sent.
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

    /// Writes an OCI layout that skopeo can copy from.
    pub(crate) fn lay_out(&self, folder: &Path) {
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

/// Debian's registry, in a folder of its own.
pub(crate) struct Debians {
    process: Child,
    pub(crate) host: String,
    folder: tempfile::TempDir,
}

/// What opens a registry with a password.
pub(crate) const LOGIN: &str = "user:open sesame";
// bcrypt, with as few rounds as it knows.
const HTPASSWD: &str = "user:$2b$04$yEncnZj7ffQw5nAPOTEWPesgON.0YClommCIyYJct2OfVvs36HFAK\n";

impl Debians {
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
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .expect("docker-registry");
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let address = lines.find_map(|line| {
            Some(line.ok()?.split_once("listening on ")?.1.split('"').next()?.to_owned())
        });
        // Whoever stops reading stops the registry.
        thread::spawn(move || lines.for_each(drop));
        Self { process, host: address.expect("the registry listens"), folder }
    }

    /// Copies an image in, as skopeo does it.
    pub(crate) fn fill(&self, image: &Documents, name: &str, options: &[&str]) {
        let layout = self.folder.path().join(name.replace([':', '/'], "-"));
        image.lay_out(&layout);
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

impl Drop for Debians {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// One request.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) path: String,
    pub(crate) authorization: Option<String>,
}

/// What to do about one.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    Bytes(Vec<u8>),
    /// Status, and headers as lines.
    Status(u16, String),
    /// Says nothing and keeps the connection.
    Hang,
    /// Sends half of this and hangs.
    Half(Vec<u8>),
    /// Sends half of this and closes.
    Cut(Vec<u8>),
}

type Answers = dyn Fn(&Asked, usize) -> Option<Reply> + Send + Sync;

/// A registry that does as it is told.
pub(crate) struct Fake {
    pub(crate) host: String,
    pub(crate) asked: Arc<Mutex<Vec<Asked>>>,
    stopped: Arc<AtomicBool>,
}

impl Fake {
    /// `special` answers first: it is given a request and how often its path was asked for before. What it
    /// leaves is answered from `image`, whose tag is whatever is asked for.
    pub(crate) fn start(
        image: Option<&Documents>,
        special: impl Fn(&Asked, usize) -> Option<Reply> + Send + Sync + 'static,
    ) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let mut blobs = HashMap::new();
        if let Some(image) = image {
            for bytes in image.layers.iter().chain([&image.config, &image.manifest]) {
                blobs.insert(digest(bytes), bytes.clone());
            }
            blobs.insert("tag".to_owned(), image.manifest.clone());
        }
        let asked = Arc::new(Mutex::new(Vec::new()));
        let stopped = Arc::new(AtomicBool::new(false));
        let special: Arc<Answers> = Arc::new(special);
        let (seen, end) = (Arc::clone(&asked), Arc::clone(&stopped));
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
                        seen.iter().filter(|one: &&Asked| one.path == request.path).count();
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
                // Whoever asked may be gone already.
                let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
                if stays {
                    hanging.push(stream);
                }
            }
        });
        Self { host, asked, stopped }
    }

    pub(crate) fn image(image: &Documents) -> Self {
        Self::start(Some(image), |_, _| None)
    }

    /// Paths asked for, with how often.
    pub(crate) fn count(&self, part: &str) -> usize {
        self.asked.lock().unwrap().iter().filter(|asked| asked.path.contains(part)).count()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        let _ = std::net::TcpStream::connect(&self.host);
    }
}

fn head(status: u16, length: usize, headers: &str) -> String {
    format!("HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n")
}

fn read_request(stream: &mut std::net::TcpStream) -> Option<Asked> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut asked = Asked { path: first.split(' ').nth(1)?.to_owned(), authorization: None };
    for line in lines {
        let line = line.ok()?;
        if line.is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("authorization")
        {
            asked.authorization = Some(value.trim().to_owned());
        }
    }
    Some(asked)
}

//! A git remote that is no forge: Apache with git's own backend, over TLS with a private
//! certificate, and with basic authentication.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
};

use harvest_e2e::{Host, eventually};
use harvest_proto::{EventBody, api::CheckOutcome};
use serde_json::json;
use tokio::net::TcpStream;

use crate::{SAMPLE, host_network::certificate_authority};

const TOKEN: &str = "g1t-t0ken-never-inside";
const MODULES: &[&str] = &[
    "mpm_prefork",
    "authn_core",
    "authn_file",
    "authz_core",
    "authz_user",
    "auth_basic",
    "alias",
    "cgi",
    "env",
    "setenvif",
    "ssl",
];

/// Apache with its own configuration, which ends with the test.
struct Apache {
    folder: tempfile::TempDir,
    server: Child,
    port: u16,
}

fn run(folder: &Path, program: &str, arguments: &str) -> String {
    let done = Command::new(program).args(arguments.split(' ')).current_dir(folder).output();
    let done = done.unwrap();
    assert!(done.status.success(), "{program} {arguments}: {done:?}");
    String::from_utf8(done.stdout).unwrap().trim().to_owned()
}

impl Apache {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        certificate_authority(folder.path());
        fs::write(at("names"), "subjectAltName=IP:127.0.0.1").unwrap();
        let openssl = |arguments: &str| run(folder.path(), "openssl", arguments);
        openssl("req -newkey rsa:2048 -nodes -subj /CN=git -keyout server.key -out server.csr");
        openssl(
            "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile \
             names -out server.pem",
        );
        let hash = openssl(&format!("passwd -apr1 {TOKEN}"));
        fs::write(at("users"), format!("x-access-token:{hash}\n")).unwrap();
        let git = |arguments: &str| run(folder.path(), "git", arguments);
        git("init -q -b main work");
        for (path, content) in SAMPLE {
            let path = folder.path().join("work").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        git("-C work add -A");
        git("-C work -c user.name=A -c user.email=a@b.c commit -q -m Begin");
        git("clone -q --bare work repositories/calc.git");
        git("--git-dir repositories/calc.git config http.receivepack true");
        // Apache changes its user.
        run(folder.path(), "chmod", "0755 .");
        run(folder.path(), "chown", "-R www-data: repositories");
        // Another process may take the port meanwhile; then the wait below ends with an error.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let modules: String = MODULES
            .iter()
            .map(|name| {
                format!("LoadModule {name}_module /usr/lib/apache2/modules/mod_{name}.so\n")
            })
            .collect();
        let config = format!(
            "{modules}ServerName 127.0.0.1\nServerRoot {root}\nDefaultRuntimeDir {root}\n\
             PidFile {root}/pid\nErrorLog {root}/error.log\nListen 127.0.0.1:{port}\n\
             User www-data\nGroup www-data\nSSLEngine on\nSSLSessionCache none\n\
             SSLCertificateFile {root}/server.pem\nSSLCertificateKeyFile {root}/server.key\n\
             SetEnv GIT_PROJECT_ROOT {root}/repositories\nSetEnv GIT_HTTP_EXPORT_ALL 1\n\
             SetEnvIf Git-Protocol \".*\" GIT_PROTOCOL=$0\n\
             ScriptAlias /git/ /usr/lib/git-core/git-http-backend/\n\
             <Location /git/>\nAuthType Basic\nAuthName git\nAuthUserFile {root}/users\n\
             Require valid-user\n</Location>\n",
            root = folder.path().display()
        );
        fs::write(at("apache.conf"), config).unwrap();
        let server = Command::new("/usr/sbin/apache2")
            .args(["-X", "-f", &at("apache.conf")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("apache2-bin is installed");
        let apache = Self { folder, server, port };
        eventually("apache to listen", || async {
            TcpStream::connect(("127.0.0.1", port)).await.ok()
        })
        .await;
        apache
    }

    fn git(&self, arguments: &str) -> String {
        let directory = "-c safe.directory=* --git-dir repositories/calc.git";
        run(self.folder.path(), "git", &format!("{directory} {arguments}"))
    }
}

impl Drop for Apache {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[tokio::test]
async fn plain_remote_gets_push_evidence_and_statement() {
    let apache = Apache::start().await;
    let ca = apache.folder.path().join("ca.pem").display().to_string();
    let env = [("SSL_CERT_FILE", ca.as_str()), ("HARVEST_PRIVATE_HOSTS", "127.0.0.1")];
    let host = Host::start_with(&env).await;
    let url = format!("https://127.0.0.1:{}/git/calc.git", apache.port);
    let add = ["repo", "add", &url, "--name", "acme/calc", "--secret", "GIT_TOKEN"];
    assert!(host.harvest(add).stderr.contains("secret GIT_TOKEN"), "the secret is missing");
    for (value, works) in [("wrong", false), (TOKEN, true)] {
        host.request(reqwest::Method::PUT, "/v1/secrets/GIT_TOKEN")
            .json(&json!({ "value": value }))
            .send()
            .await
            .unwrap();
        let added = host.harvest(add);
        assert_eq!(added.code == 0, works, "{added:?}");
        assert!(works || added.stderr.contains("renew it with `harvest secret set"), "{added:?}");
    }
    let work = |line: &str| {
        let fix = "sed -i 's/a - b/a + b/' calc.py";
        json!([{ "bash": format!("{fix}; echo '# {line}' >> calc.py; git commit -qam {line} && git push -q") }])
    };
    let session = host.scripted("acme/calc", "Fix it.", &work("one")).await.id;
    let mut follower = host.follow(session.clone());
    let checked = |body: &EventBody| matches!(body, EventBody::Evidence(_));
    let first = follower.until("the evidence", checked).await;
    let EventBody::Evidence(evidence) = first.body else { unreachable!("it was asked for") };
    assert_eq!(evidence.outcome, CheckOutcome::Passed);
    let branch = format!("refs/heads/{}", host.show(&session).await.repositories[0].branch);
    assert_eq!(apache.git(&format!("rev-parse {branch}")), evidence.commit);
    let said = host.events(&session).await.into_iter().find_map(|body| match body {
        EventBody::PrSkipped { reason, hint, .. } => Some((reason, hint.unwrap())),
        _ => None,
    });
    let (reason, hint) = said.expect("it is said that there is no pull request");
    assert!(reason.contains("is at no forge with an API for pull requests"), "{reason}");
    assert!(hint.contains("open the pull request on the host's page"), "{hint}");
    // Its own commit is replaced and kept there, as at a forge.
    let amend = "git commit -q --amend -m two && git push -q";
    host.prompt(&session, "Again.", &json!([{ "bash": amend }])).await;
    let second = follower.after(first.seq, "the second evidence", checked).await;
    let EventBody::Evidence(second) = second.body else { unreachable!("it was asked for") };
    assert_eq!(apache.git(&format!("rev-parse {branch}")), second.commit);
    let kept = format!("refs/harvest/kept/{}", evidence.commit);
    assert_eq!(apache.git(&format!("rev-parse {kept}")), evidence.commit);
    let (_, inside) = host
        .exec(&session, "root", &format!("grep -rlaF {TOKEN} /home /workspace /app /etc; env"))
        .await;
    assert!(!inside.contains(TOKEN), "{inside}");
}

//! Moves an etcd cluster of Bitnami's chart to an EtcdCluster with the commands in `docs/migration.md`, and uninstalls
//! the old release. `e2e/fixtures/bitnami` describes how the fixture differs from Bitnami's chart.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::guide::Guide;
use e2e::manifests::aws_secret;
use e2e::objects::{Kind, await_complete, field};
use e2e::store_state::StoreState;
use e2e::{DEADLINE, Keyspace, Sandbox, chart, scenario, step};

use crate::fixtures::root;

/// The Helm release of the old etcd cluster. Its objects have the name `shop-etcd`.
const OLD: &str = "shop";
const PASSWORD: &str = "a-password-of-bitnami";
const KEYS: usize = 300;

/// Whether the old etcd cluster has a root password, which Bitnami's chart creates by default.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Auth {
    On,
    Off,
}

/// Two sections of `docs/migration.md`, with the names of this test instead of placeholders.
struct Guides {
    from_bitnami: Guide,
    with_backup: Guide,
}

impl Guides {
    fn open(sandbox: &Sandbox, auth: Auth, bucket: &Bucket) -> Result<Self> {
        let s3 = sandbox.env.s3()?;
        let path = format!("{}/etcd/move", bucket.name);
        let store = format!(
            "awsSecret: aws, endpoint: \"{}\", forcePathStyle: true}}",
            s3.endpoint
        );
        let values = [
            ("NAMESPACE", sandbox.namespace.as_str()),
            ("RELEASE", OLD),
            ("my-bucket/etcd/move", path.as_str()),
            ("awsSecret: aws}", store.as_str()),
        ];
        let document = root().join("docs/migration.md");
        let open = |heading: &str| Guide::open(&document, heading, &values);
        let mut with_backup = open("Move with a backup")?;
        if auth == Auth::Off {
            for line in ["authSecret: old-root", "auth: {secret: old-root}"] {
                with_backup.leave_out(line)?;
            }
        }
        Ok(Self {
            from_bitnami: open("Move from Bitnami's chart")?,
            with_backup,
        })
    }
}

/// Installs the old etcd cluster, writes keys, and returns the data of the cluster.
async fn make_old(sandbox: &Sandbox, auth: Auth) -> Result<StoreState> {
    let (env, namespace) = (&sandbox.env, &sandbox.namespace);
    let folder = root().join("e2e/fixtures/bitnami");
    let folder = folder.to_string_lossy().into_owned();
    let version = format!("image.tag={}", env.newest_of("3.6")?);
    let password = format!("auth.rbac.rootPassword={PASSWORD}");
    let mut words = vec![
        "upgrade",
        "--install",
        OLD,
        &folder,
        "-n",
        namespace,
        "--set-string",
    ];
    words.extend([&*version, "--set-string", &*password]);
    if auth == Auth::Off {
        words.extend(["--set", "auth.rbac.create=false"]);
        words.extend(["--set", "auth.rbac.allowNoneAuthentication=true"]);
    }
    chart::helm(env, &words).await?;
    let rollout = [
        "rollout",
        "status",
        "statefulset/shop-etcd",
        "--timeout=300s",
    ];
    sandbox.kubectl(&rollout).await?;
    let keys = Keyspace::of_pod(env, namespace, "shop-etcd-0").await?;
    keys.fill("kept/", KEYS, |_| ()).await?;
    keys.fill_mixed("mixed/", 40).await?;
    let state = StoreState::now(&keys).await?;
    if auth == Auth::On {
        // In Bitnami's chart, the start script enables authentication. The fixture has no start script, so the test
        // enables authentication.
        keys.enable_auth(PASSWORD).await?;
    }
    Ok(state)
}

async fn connect(sandbox: &Sandbox, auth: Auth) -> Result<Keyspace> {
    let (env, namespace) = (&sandbox.env, &sandbox.namespace);
    match auth {
        Auth::On => Keyspace::of_cluster_as(env, namespace, "new", ("root", PASSWORD)).await,
        Auth::Off => Keyspace::of_cluster(env, namespace, "new").await,
    }
}

/// Runs the commands of the guide from the backup to the new cluster.
async fn follow(sandbox: &Sandbox, auth: Auth, guides: &mut Guides) -> Result<()> {
    let env = &sandbox.env;
    if auth == Auth::On {
        guides
            .from_bitnami
            .run(env)
            .await
            .context("copy the password")?;
    } else {
        guides.from_bitnami.skip("sh")?;
    }
    let guide = &mut guides.with_backup;
    guide.write("move-backup.yaml")?;
    guide.run(env).await?;
    await_complete(&sandbox.objects(Kind::EtcdBackup), "move", DEADLINE).await?;
    guide.write("move-restore.yaml")?;
    guide.run(env).await?;
    await_complete(&sandbox.objects(Kind::EtcdRestore), "move", DEADLINE).await?;
    Ok(())
}

async fn migrate(sandbox: &Sandbox, auth: Auth) -> Result<()> {
    let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
    sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
    let mut guides = Guides::open(sandbox, auth, &bucket)?;
    let before = step("create the old etcd", make_old(sandbox, auth)).await?;
    step("follow the guide", follow(sandbox, auth, &mut guides)).await?;
    let after = sandbox.await_members("new", 3).await?;
    let newest = sandbox.env.newest_of("3.7")?;
    ensure!(field(&after, "/status/currentVersion") == newest.as_str());
    let keys = connect(sandbox, auth).await?;
    before.ensure_same(&StoreState::now(&keys).await?)?;

    let removed = guides.from_bitnami.run(&sandbox.env);
    step("uninstall the old release", removed).await?;
    await_no_old_data(sandbox).await?;
    keys.verify("kept/", KEYS).await?;
    keys.fill("later/", 10, |_| ()).await?;
    drop(keys);
    sandbox.await_members("new", 3).await.map(drop)
}

/// Waits until the StatefulSet, the Services and the PVCs of the old release are deleted.
async fn await_no_old_data(sandbox: &Sandbox) -> Result<()> {
    let words = ["get", "pvc,statefulset,service", "-l"];
    let selector = format!("app.kubernetes.io/instance={OLD}");
    e2e::until("the old objects are deleted", DEADLINE, async || {
        let listed = [&words[..], &[&selector, "-o", "name"]].concat();
        let names = sandbox.kubectl(&listed).await?;
        Ok(if names.trim().is_empty() {
            e2e::wait::Poll::Done(())
        } else {
            e2e::wait::Poll::NotYet(names)
        })
    })
    .await
}

#[tokio::test]
async fn etcd_of_bitnami_chart_moves_with_users_and_data() {
    scenario("migrate_bitnami", async |sandbox| {
        migrate(sandbox, Auth::On).await
    })
    .await;
}

mod full {
    use super::*;

    #[tokio::test]
    async fn etcd_of_bitnami_chart_moves_without_authentication() {
        scenario("migrate_bitnami_no_auth", async |sandbox| {
            migrate(sandbox, Auth::Off).await
        })
        .await;
    }
}

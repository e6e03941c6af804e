{{/* Refuses a list, as in earlier charts, and prints the equivalent map: (list, at). */}}
{{- define "diptych.refuseList" -}}
{{- $map := dict }}
{{- range .list }}
{{- if kindIs "map" . }}{{ $_ := set $map (toString .name) (omit . "name") }}{{ end }}
{{- end }}
{{- fail (printf "%s is a list; it is a map keyed by name, so that --set %s.NAME... and overlays can change one entry (docs/guides/kubernetes.md, Models and pools). Write instead:\n%s:\n%s\n" .at .at (last (splitList "." .at)) (toYaml $map | indent 2)) }}
{{- end }}

{{/* Type of a model's source, derived from its keys: (source). */}}
{{- define "diptych.sourceType" -}}
{{- .source.type | default (ternary "pvc" (ternary "image" "hub" (hasKey .source "reference")) (hasKey .source "claimName")) }}
{{- end }}

{{/*
Models by name, as YAML {models: [{name, source: {type, ...}, ...}]}: (root). Null entries are omitted. The result is cached at
the root, because many templates use it.
*/}}
{{- define "diptych.models" -}}
{{- if not (hasKey .root "diptychModels") }}
{{- $_ := set .root "diptychModels" (include "diptych.makeModels" .) }}
{{- end }}
{{- .root.diptychModels }}
{{- end }}

{{- define "diptych.makeModels" -}}
{{- if kindIs "slice" .root.Values.models }}
{{- include "diptych.refuseList" (dict "list" .root.Values.models "at" "models") }}
{{- end }}
{{- $default := .root.Values.sharedRouter.defaultModel }}
{{- if and $default (not (get .root.Values.models $default)) }}
{{- fail (printf "sharedRouter.defaultModel is %s, but models has %s" $default (keys .root.Values.models | sortAlpha | join ", ")) }}
{{- end }}
{{- $models := list }}
{{- range $name, $model := .root.Values.models }}
{{- if $model }}
{{- $source := merge (dict "type" (include "diptych.sourceType" (dict "source" $model.source))) $model.source }}
{{- include "diptych.checkCache" (dict "source" $source "name" $name) }}
{{- if $source.cacheVolume }}{{ $_ := set $source "cacheClaim" (include "diptych.objectName" (dict "root" $.root "role" "model" "name" $name)) }}{{ end }}
{{- $entry := merge (dict "name" (toString $name) "source" $source) $model }}
{{- with $model.tokenizer }}
{{- $_ := set $entry "tokenizer" (merge (dict "type" (include "diptych.sourceType" (dict "source" .))) .) }}
{{- end }}
{{- $models = ternary (prepend $models $entry) (append $models $entry) (eq (toString $name) $default) }}
{{- end }}
{{- end }}
{{- if not $models }}
{{- fail "models is empty: name a model, for example --set models.smollm2-135m.source.id=smollm2-135m" }}
{{- end }}
{{- toYaml (dict "models" $models) }}
{{- end }}

{{/* Refuses two caches, and a prefetch Job without a shared volume: (source, name). */}}
{{- define "diptych.checkCache" -}}
{{- if and .source.cacheVolume .source.cacheClaim }}
{{- fail (printf "models.%s.source has both cacheClaim %s, an existing claim, and cacheVolume, which the chart creates: use one of them" .name .source.cacheClaim) }}
{{- end }}
{{- if and .source.prefetch (not (or .source.cacheVolume .source.cacheClaim)) }}
{{- fail (printf "models.%s.source.prefetch needs a volume for all pods: set cacheVolume.size or cacheClaim" .name) }}
{{- end }}
{{- end }}

{{/* Model of a pool, as YAML: (root, name, for). */}}
{{- define "diptych.model" -}}
{{- $wanted := .name }}
{{- $models := (include "diptych.models" (dict "root" .root) | fromYaml).models }}
{{- $known := list }}
{{- $found := dict }}
{{- range $models }}
{{- $known = append $known .name }}
{{- if or (eq .name $wanted) (and (not $wanted) (eq (len $models) 1)) }}
{{- $found = . }}
{{- end }}
{{- end }}
{{- if not $found }}
{{- if $wanted }}
{{- fail (printf "%s names the model %q, but models has %s" .for $wanted (join ", " $known)) }}
{{- else }}
{{- fail (printf "%s must name its model, one of %s; or disable the pool with enabled: false" .for (join ", " $known)) }}
{{- end }}
{{- end }}
{{- toYaml $found }}
{{- end }}

{{/* A model for its router, as YAML: its source is that of its tokenizer, if there is one: (model). */}}
{{- define "diptych.routerView" -}}
{{- toYaml (set (mustDeepCopy .model) "source" (.model.tokenizer | default .model.source)) }}
{{- end }}

{{/* Default model of a pool: the model with the pool's name, or "": (root, pool). */}}
{{- define "diptych.modelOfName" -}}
{{- range (include "diptych.models" (dict "root" .root) | fromYaml).models }}
{{- if eq .name $.pool }}{{ .name }}{{ end }}
{{- end }}
{{- end }}

{{/* Removes all null values from a nested mapping, so that a pool can drop inherited values. */}}
{{- define "diptych.dropNulls" -}}
{{- range $key, $value := . }}
{{- if kindIs "invalid" $value }}{{ $_ := unset $ $key }}{{ else if kindIs "map" $value }}{{ include "diptych.dropNulls" $value }}{{ end }}
{{- end }}
{{- end }}

{{/* A pool merged with `workers` and the role's defaults, as YAML: (root, role, name, pool). */}}
{{- define "diptych.pool" -}}
{{- $role := index .root.Values .role }}
{{- $pool := mustMergeOverwrite (dict) (mustDeepCopy .root.Values.workers) (mustDeepCopy $role.defaults) (mustDeepCopy .pool) }}
{{- include "diptych.dropNulls" $pool }}
{{- $wanted := .pool.model | default (include "diptych.modelOfName" (dict "root" .root "pool" .name)) }}
{{- $model := include "diptych.model" (dict "root" .root "name" $wanted "for" (printf "%s pool %s" .role .name)) | fromYaml }}
{{- $_ := set $pool "name" .name }}
{{- $_ := set $pool "model" $model.name }}
{{- toYaml $pool }}
{{- end }}

{{/* Merged pools of a role by name, as YAML {pools: [...]}; with a model, only its pools: (root, role, model). */}}
{{- define "diptych.pools" -}}
{{- $key := printf "diptychPools/%s/%s" .role (.model | default "") }}
{{- if not (hasKey .root $key) }}
{{- $_ := set .root $key (include "diptych.makePools" .) }}
{{- end }}
{{- get .root $key }}
{{- end }}

{{- define "diptych.makePools" -}}
{{- $given := (index .root.Values .role).pools }}
{{- if kindIs "slice" $given }}
{{- include "diptych.refuseList" (dict "list" $given "at" (printf "%s.pools" .role)) }}
{{- end }}
{{- $pools := list }}
{{- /* Without a model `helm template` stops earlier, but `helm lint` continues. */}}
{{- range $name, $pool := ternary $given dict (gt (len (include "diptych.models" (dict "root" .root) | fromYaml).models) 0) }}
{{- if not (or (kindIs "invalid" $pool) (eq (toString $pool.enabled) "false")) }}
{{- $pool := include "diptych.pool" (dict "root" $.root "role" $.role "name" (toString $name) "pool" $pool) | fromYaml }}
{{- if or (not $.model) (eq $pool.model $.model) }}
{{- $pools = append $pools $pool }}
{{- end }}
{{- end }}
{{- end }}
{{- toYaml (dict "pools" $pools) }}
{{- end }}

{{/* "true" if a pool of the model can scale to zero: (root, model). */}}
{{- define "diptych.scalesToZero" -}}
{{- range $role := list "prefill" "decode" }}
{{- range (include "diptych.pools" (dict "root" $.root "role" $role "model" $.model) | fromYaml).pools }}
{{- if and (has .autoscaling.type (list "keda" "planner")) (eq (int .autoscaling.minReplicas) 0) }}true{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Startup time, in seconds, of the slowest pool that can scale to zero, else 0: (root, model). */}}
{{- define "diptych.wakingSeconds" -}}
{{- $longest := 0 }}
{{- range $role := list "prefill" "decode" }}
{{- range (include "diptych.pools" (dict "root" $.root "role" $role "model" $.model) | fromYaml).pools }}
{{- if and (has .autoscaling.type (list "keda" "planner")) (eq (int .autoscaling.minReplicas) 0) }}{{ $longest = max $longest (int .startupSeconds) }}{{ end }}
{{- end }}
{{- end }}
{{- $longest }}
{{- end }}

{{/* Refuses an update that can neither add nor remove a pod: (spec, for). */}}
{{- define "diptych.checkStrategy" -}}
{{- if and (has (toString .spec.strategy.maxSurge) (list "0" "0%")) (has (toString .spec.strategy.maxUnavailable) (list "0" "0%")) }}
{{- fail (printf "%s: strategy.maxSurge and strategy.maxUnavailable are both 0, so no update could start" .for) }}
{{- end }}
{{- end }}

{{/* Refuses more devices than a worker can use: (pool, for). */}}
{{- define "diptych.checkDevices" -}}
{{- if gt (int .pool.accelerator.count) 1 }}
{{- fail (printf "%s: accelerator.count is %d, but each rank of a worker uses one device, so the others would be idle: set count 1, and replicas %d or tensorParallelSize %d" .for (int .pool.accelerator.count) (mul (int .pool.accelerator.count) (int .pool.replicas)) (int .pool.accelerator.count)) }}
{{- end }}
{{- end }}

{{/* Refuses a disruption budget that blocks every eviction: (pdb, least, for). */}}
{{- define "diptych.checkBudget" -}}
{{- $none := false }}
{{- $key := ternary "minAvailable" "maxUnavailable" (hasKey .pdb "minAvailable") }}
{{- if and .pdb.enabled (gt (int .least) 0) }}
{{- if hasKey .pdb "minAvailable" }}
{{- $share := toString .pdb.minAvailable }}
{{- $none = ternary (eq $share "100%") (ge (int .pdb.minAvailable) (int .least)) (hasSuffix "%" $share) }}
{{- else }}
{{- $none = has (toString .pdb.maxUnavailable) (list "0" "0%") }}
{{- end }}
{{- end }}
{{- if $none }}
{{- fail (printf "%s: with %d pods, pdb.%s %v allows no eviction, so no node with one of them could ever be drained: set maxUnavailable 1, or pdb.enabled false" .for (int .least) $key (get .pdb $key)) }}
{{- end }}
{{- end }}

{{/* Checks that the schema cannot express. Rendered once, by the routers' template. */}}
{{- define "diptych.check" -}}
{{- range (include "diptych.models" (dict "root" $) | fromYaml).models }}
{{- if not (include "diptych.pools" (dict "root" $ "role" "decode" "model" .name) | fromYaml).pools }}
{{- fail (printf "model %s has no decode pool: add decode.pools.NAME.model=%s" .name .name) }}
{{- end }}
{{- if and (or (eq .source.type "image") (eq (.tokenizer | default dict).type "image")) (semverCompare "<1.33-0" $.Capabilities.KubeVersion.Version) }}
{{- fail (printf "model %s is an OCI image volume, which needs Kubernetes 1.33 (here %s); before 1.35 also the feature gate ImageVolume" .name $.Capabilities.KubeVersion.Version) }}
{{- end }}
{{- end }}
{{- range (include "diptych.routers" (dict "root" $) | fromYaml).routers }}
{{- include "diptych.checkStrategy" (dict "spec" .spec "for" .for) }}
{{- include "diptych.checkStore" (dict "router" .spec "for" .for) }}
{{- include "diptych.checkBudget" (dict "pdb" .spec.pdb "for" .for "least" (ternary .spec.autoscaling.minReplicas .spec.replicas .spec.autoscaling.enabled)) }}
{{- end }}
{{- include "diptych.checkShared" (dict "root" $) }}
{{- range $role := list "prefill" "decode" }}
{{- range (include "diptych.pools" (dict "root" $ "role" $role) | fromYaml).pools }}
{{- $for := printf "%s pool %s" $role .name }}
{{- include "diptych.checkStrategy" (dict "spec" . "for" $for) }}
{{- include "diptych.checkDevices" (dict "pool" . "for" $for) }}
{{- include "diptych.checkRankHosts" (dict "pool" . "for" $for) }}
{{- include "diptych.checkBudget" (dict "pdb" .pdb "for" $for "least" (ternary .replicas .autoscaling.minReplicas (eq .autoscaling.type "none"))) }}
{{- end }}
{{- end }}
{{- if and .Values.monitoring.podMonitor.enabled .Values.monitoring.serviceMonitor.enabled }}
{{- fail "monitoring.podMonitor and monitoring.serviceMonitor are both enabled: every pod would be scraped twice" }}
{{- end }}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuerRef.name) }}
{{- fail "tls.certManager.enabled needs tls.certManager.issuerRef.name" }}
{{- end }}
{{- end }}

{{/* Refuses a response store with several routers, because they do not share stored responses: (router, for). */}}
{{- define "diptych.checkStore" -}}
{{- $store := .router.responseStore }}
{{- if ne $store.type "none" }}
{{- if or .router.autoscaling.enabled (gt (int .router.replicas) 1) }}
{{- fail (printf "%s: responseStore.type %s needs one replica and no autoscaling, because routers do not share stored responses" .for $store.type) }}
{{- end }}
{{- if and (eq $store.type "claim") (not $store.claimName) }}
{{- fail (printf "%s: responseStore.type claim needs responseStore.claimName" .for) }}
{{- end }}
{{- end }}
{{- end }}
